"""Draws each script of the two series as a column: a bar per line, green where its step adds it.

A red tick at the left is where the step removes lines. `make docs` runs this.
"""

import difflib
from pathlib import Path

from tools.pages.fences import START
from tools.pages.picture import Picture, assets_folder, short
from tools.steps import GPT, ROOT, STEPS, changed_lines

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


def changes(old, new):
    """Returns the indices of the lines that are new, and before which old ones were removed."""
    added, removed = set(), []
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    for tag, old_start, old_end, start, end in opcodes:
        if tag != "equal":
            added |= set(range(start, end))
            removed += [start] if old_start < old_end else []
    return added, removed


def draw(step, pitch, folder):
    lines = read(step.file)
    added, removed = changes(read(step.base), lines) if step.base else ((), ())
    name = Path(step.file).stem
    count = changed_lines(step.base, step.file) if step.base else len(lines)
    size = f"{count} changed lines" if step.base else f"{count} lines"
    picture = Picture(WIDTH, TOP + HEIGHT + 4, f"{name}: {size}", STYLE)
    picture.text(LEFT, 13, name, "")
    picture.text(LEFT, 30, size, "size")
    for number, line in enumerate(lines):
        code = line.strip()
        if code:
            y = short(TOP + pitch * number)
            look = "added" if number in added else ""
            picture.path(f"M{LEFT + len(line) - len(line.lstrip())} {y}h{len(code)}", look)
    for number in removed:
        picture.path(f"M0 {short(TOP + pitch * number)}h4", "removed")
    picture.save(folder / f"{name}.svg")


def main():
    for series in ([START[0], *STEPS], GPT):
        pitch = HEIGHT / max(len(read(step.file)) for step in series)
        for step in series:
            draw(step, pitch, assets_folder() / "chain")


if __name__ == "__main__":
    main()
