"""Shows the diffs in the site: red and green bands, and within them the colours of the language.

mkdocs.yml names `format_diff`, for a ```diff fence.
"""

import functools
import json
from html import escape
from itertools import groupby

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Keyword, Literal, Operator, String

from tools.pages.fences import changed_units, language_of, marked_units, step_to
from tools.units.stored import DOCSTRING, NOTHING, load, owners
from tools.watch.recordings import RECORDINGS

TAGS = {"+": "ins", "-": "del", " ": "span class=line"}
# What docs/assets/series.css colors: pages have thousands of these, so their tags are short.
COLORED = {Comment: "i", String.Doc: "i", Keyword: "b", Operator.Word: "b", Literal: "u"}


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
    def tag_of(token):
        return next((tag for kind, tag in COLORED.items() if token[0] in kind), None)

    html = ""
    tokens = get_lexer_by_name(language, stripnl=False).get_tokens("\n".join(lines))
    for tag, group in groupby(tokens, tag_of):
        text = escape("".join(part for _, part in group), quote=False)
        if tag:
            text = "\n".join(part and f"<{tag}>{part}</{tag}>" for part in text.split("\n"))
        html += text
    return html.split("\n")[: len(lines)]


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
        tag = TAGS[sign]
        unit = next(units, None) if sign in "+-" else None
        data = f" data-unit={unit}" if unit else ""
        rows.append(f"<{tag}{data}>{shown}\n</{tag.partition(' ')[0]}>")
    return "".join(rows).replace("\n</span><span class=line>", "\n")  # one for lines of context


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
    caption = escape(f"{file} · {unit}")
    if unit in dict(marked_units(file)):  # unless the step removes it
        caption = f'<a href="#{file}:{unit}">{caption}</a>'
    shown = format_code(format_lines(lines, options["lang"], units_of_lines(file)[unit]))
    return f'<div class="diff highlight"><p class="caption">{caption}</p>{shown}</div>'


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
