"""Draws each script of the two series as a column: a bar per line, green where its step adds it.

A red tick at the left is where the step removes lines. `make docs` runs this.
"""

import difflib
from collections import defaultdict
from pathlib import Path

from tools.pages.fences import START
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
WIDTH, LEFT, TOP, HEIGHT = 116, 6, 40, 270  # of a column, in pixels; a character is one


def read(file):
    return (ROOT / file).read_text().splitlines()


def draw(step, pitch):
    """Returns the lines of a column's SVG; `pitch` is the height of a line of code in pixels."""
    lines = read(step.file)
    old = read(step.base) if step.base else lines
    opcodes = difflib.SequenceMatcher(None, old, lines, autojunk=False).get_opcodes()
    paths = defaultdict(str)  # by their class
    for tag, _, _, start, end in opcodes:
        look = "" if tag == "equal" else ' class="added"'
        for number, line in enumerate(lines[start:end], start):
            if code := line.strip():
                x = LEFT + len(line) - len(line.lstrip())
                paths[look] += f"M{x} {round(TOP + pitch * number, 1):g}h{len(code)}"
    for tag, _, _, start, _ in opcodes:
        if tag in ("delete", "replace"):
            paths[' class="removed"'] += f"M0 {round(TOP + pitch * start, 1):g}h4"
    count = changed_lines(step.base, step.file) if step.base else len(lines)
    size = f"{count} changed lines" if step.base else f"{count} lines"
    name = Path(step.file).stem
    box = f'width="{WIDTH}" height="{TOP + HEIGHT + 4}" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 4}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
        f"<title>{name}: {size}</title>",
        STYLE,
        *(f'<path{look} d="{path}"/>' for look, path in paths.items()),
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
