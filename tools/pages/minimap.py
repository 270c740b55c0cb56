"""Draws each script of the two series as a column: a bar per line, green where its step adds it.

A red tick at the left is where the step removes lines. `make docs` runs this.
"""

from pathlib import Path

from tools.pages.fences import START, signed_lines
from tools.steps import GPT, ROOT, STEPS, changed_lines

FOLDER = ROOT / "docs" / "assets" / "chain"
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .size { fill: #59636e }
path { stroke: #b6bcc6 } .added { stroke: #1a7f37 } .removed { stroke: #cf222e; stroke-width: 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .size { fill: #9198a1 }
  path { stroke: #4b535d } .added { stroke: #3fb950 } .removed { stroke: #f85149 }
}
</style>"""
LOOKS = {"+": ' class="added"', " ": "", "-": ' class="removed"'}
WIDTH, LEFT, TOP, HEIGHT = 116, 6, 40, 270  # of a column, in pixels; a character is one


def read(file):
    return (ROOT / file).read_text().splitlines()


def draw(step, pitch):
    """Returns the lines of a column's SVG; `pitch` is the height of a line of code in pixels."""
    lines = read(step.file)
    old = read(step.base) if step.base else lines
    paths = {"+": "", " ": "", "-": ""}
    number = 0
    for line in signed_lines(old, lines):
        y = f"{round(TOP + pitch * number, 1):g}"
        if line[0] == "-":
            paths["-"] = paths["-"].removesuffix(f"M0 {y}h4") + f"M0 {y}h4"  # once per place
            continue
        number += 1
        if code := line[1:].strip():
            x = LEFT + line[1:].index(code)
            paths[line[0]] += f"M{x} {y}h{len(code)}"
    count = changed_lines(step.base, step.file) if step.base else len(lines)
    size = f"{count} changed lines" if step.base else f"{count} lines"
    name = Path(step.file).stem
    box = f'width="{WIDTH}" height="{TOP + HEIGHT + 4}" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 4}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
        f"<title>{name}: {size}</title>",
        STYLE,
        *(f'<path{LOOKS[sign]} d="{path}"/>' for sign, path in paths.items() if path),
        f'<text x="{LEFT}" y="13">{name}</text>',
        f'<text class="size" x="{LEFT}" y="30">{size}</text>',
        "</svg>\n",
    ]


def main():
    for series in ([START[0], *STEPS], GPT):
        pitch = HEIGHT / max(len(read(step.file)) for step in series)
        for step in series:
            picture = FOLDER / f"{Path(step.file).stem}.svg"
            picture.write_text("\n".join(draw(step, pitch)))


if __name__ == "__main__":
    main()
