"""Shows the diffs in the site: red and green bands, and within them the colours of the language.

mkdocs.yml names `format_diff`, for a ```diff fence.
"""

import functools
import json
from html import escape

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from tools.pages.fences import changed_units, language_of, marked_units, step_to
from tools.units.stored import DOCSTRING, NOTHING, load, owners
from tools.watch.recordings import RECORDINGS

FORMATTER = HtmlFormatter(nowrap=True)
TAGS = {"+": "ins", "-": "del", " ": "span"}


def highlight_lines(lines, language):
    """Returns the HTML of each line of a piece of code, which may begin inside a docstring."""
    inside = "".join(lines).count('"""') % 2 and '"""' not in lines[0]
    rows, paragraph = [], ['"""'] if inside else []
    for line in lines:
        paragraph.append(line)
        if not line.strip() and "".join(paragraph).count('"""') % 2 == 0:
            rows += highlight_paragraph(tuple(paragraph), language)
            paragraph = []
    return [*rows, *highlight_paragraph(tuple(paragraph), language)][bool(inside) :]


@functools.cache  # most paragraphs are in many files
def highlight_paragraph(lines, language):
    lexer = get_lexer_by_name(language, stripnl=False)
    return highlight("\n".join(lines), lexer, FORMATTER).split("\n")[: len(lines)]


def format_lines(lines, language, units=()):
    """Returns the HTML of the lines of a diff; the changed ones of which may be of `units`."""
    units = iter(units)
    sides = {
        "+": iter(highlight_lines([line[1:] for line in lines if line[:1] in " +"], language)),
        "-": iter(highlight_lines([line[1:] for line in lines if line[:1] in " -"], language)),
    }
    rows = []
    for line in lines:
        if line.startswith("@@"):
            rows.append('<span class="gap">⋯</span>')
            continue
        sign = line[0]
        for side in "+-":  # a line of context is in both
            if sign in (side, " "):
                shown = next(sides[side])
        indent = len(line) - len(line[1:].lstrip()) - 1
        tag = TAGS[sign]
        unit = next(units, None) if sign in "+-" else None
        data = f' data-unit="{unit}"' if unit else ""
        rows.append(f'<{tag} class="line" style="--indent: {indent}ch"{data}>{shown}\n</{tag}>')
    return "".join(rows)


@functools.cache
def units_of_lines(file):
    """Returns, by function, the unit of each changed line of a file's step, such as `a.py:3`."""
    diffs = changed_units(step_to(file))
    changed = [(name, line) for name, lines in diffs.items() for line in lines if line[0] in "+-"]
    found = {name: [] for name in diffs}
    numbers = owners([line for _, line in changed], load().get(file, []))
    for (name, _), number in zip(changed, numbers, strict=True):
        found[name].append(None if number is None else f"{file}:{number}")
    return found


def on_page(unit):
    """Returns what a page shows of a unit: a sentence, and which check or test fails without it."""
    name = unit["falls"].partition("[")[0]
    if name in (DOCSTRING, NOTHING):
        name = ""
    elif not name.startswith("test_"):
        name = f"make check: {name}"
    return {"without": unit["without"], "fails": name}


def format_units(files):
    """Returns what falls without each unit of these files, for docs/assets/units.js."""
    shown = {file: list(map(on_page, load()[file])) for file in files if file in load()}
    if not shown:
        return ""
    top = "../" * max(file.count("/") for file in shown)
    data = json.dumps(shown).replace("</", r"<\/")
    script = f'<script id="units" type="application/json">{data}</script>'
    return f'{script}<script src="{top}assets/units.js"></script>'


def format_diff(source, language, css_class, options, md, **kwargs):
    """Returns the HTML of a fence, as pymdownx.superfences asks a custom fence to do."""
    lines = [line or " " for line in source.split("\n")]  # where an empty line has lost its blank
    file, unit = options["file"], options["unit"]
    whole = dict(marked_units(file)).get(unit, [])  # none if the step removes it
    while whole and whole[-1] in "+ ":  # the blank lines before the next unit
        whole.pop()
    caption = escape(f"{file} · {unit}")
    if whole:
        caption = f'<a href="#{file}:{unit}">{caption}</a>'
    switch = ""
    if whole not in ([], lines):
        switch = (
            "<details><summary><span>in full</span><span>as a diff</span></summary>"
            f"{format_code(format_lines(whole, options['lang']))}</details>"
        )
    shown = format_code(format_lines(lines, options["lang"], units_of_lines(file)[unit]))
    return f'<div class="diff highlight"><p class="caption">{caption}</p>{shown}{switch}</div>'


def format_code(html):
    """Returns a block of code, which one can scroll by the keyboard."""
    return f'<pre><code tabindex="0">{html}</code></pre>'


def check_options(language, inputs, options, attrs, md):
    """Tells superfences what a fence may say: its language, and the file and unit it is from."""
    options.update(inputs)
    return set(inputs) <= {"lang", "file", "unit"}


def format_file(file):
    """Returns the HTML of a whole file, with an anchor for each of its units."""
    code = "".join(
        f'<span class="unit" id="{file}:{unit}">{format_lines(lines, language_of(file))}</span>'
        for unit, lines in marked_units(file)
    )
    return f'<div class="diff file highlight">{format_code(code)}</div>'


def link_to_diff(file):
    """Returns a link to a file's step in docs/diff.md, from the file's page."""
    base = step_to(file).base
    top = "" if file.startswith("slurm/") else "../" * file.count("/")
    links = f"[Compare it]({top}diff.md?a={base}&b={file}) with `{base}`, or with any other file."
    if file in json.loads(RECORDINGS.read_text()):
        links += f" [Watch it run]({top}watch.md?watch={file}&step=0), line by line."
    return links
