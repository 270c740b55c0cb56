"""Shows the diffs in the site: red and green bands, and within them the colours of the language.

mkdocs.yml names `format_diff`, for a ```diff fence, and this module, a Markdown extension: it tells
each fence that cog fills its file and unit, appends the whole files to the page, and puts the
reading time below the page's title and, in the sidebar, the script's name. Into docs/diff.md,
docs/compose.md, docs/watch.md and docs/choose.md it puts what their JavaScript needs. It also marks
what docs/assets/series.css needs to wrap code well on a phone.
"""

import ast
import json
import math
import re
from html import escape, unescape

from markdown import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from bench import calculator, memory, scaling
from tools.compose.__main__ import BASES, read_pairs
from tools.judge.faults import FAULTS
from tools.pages.check_docs import reading_time
from tools.pages.fences import DOCUMENTED, language_of, marked_units, step_to
from tools.steps import ROOT, STAGES

TAGS = {"+": "ins", "-": "del", " ": "span"}
FOLDERS = {
    "": "The stages",
    "recipes": "Recipes",
    "by_hand": "By hand",
    "gpt": "The second series",
    "slurm": "Job files",
}
CODE_BLOCK = re.compile(
    r'(<div class="language-(?:python|pycon|bash) highlight">.*?<code>)(.*?)(</code>)', re.DOTALL
)
INLINE_CODE = re.compile(r"(?<=<code>)[^<\n]+(?=</code>)")
RECORDINGS = ROOT / "docs" / "assets" / "recordings.json"
COG_FENCE = r'<!-- \[\[\[cog fence\("(.+)", "(.+)"\) \]\]\] -->\n```'


def highlight_lines(lines, language):
    """Returns the HTML of each line of a piece of code, which may begin inside a docstring."""
    inside = "".join(lines).count('"""') % 2 and '"""' not in lines[0]
    lexer = get_lexer_by_name(language, stripnl=False)
    text = "\n".join(['"""', *lines] if inside else lines)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).split("\n")[bool(inside) :]


def format_lines(lines, language):
    """Returns the HTML of the lines of a diff."""
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
        rows.append(f'<{tag} class="line" style="--indent: {indent}ch">{shown}\n</{tag}>')
    return "".join(rows)


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
    shown = format_code(format_lines(lines, options["lang"]))
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


def format_data(names, scripts, **more):
    """Returns what scripts of docs/assets need: each line of some files, once, and `more`."""
    lines, files = {}, {}  # the number and the HTML of each line; the numbers of each file's lines
    for file in names:
        text = (ROOT / file).read_text().splitlines()
        for line, html in zip(text, highlight_lines(text, language_of(file)), strict=False):
            lines.setdefault(line, (len(lines), html))
        files[file] = [lines[line][0] for line in text]
    data = json.dumps({"lines": [html for _, html in lines.values()], "files": files} | more)
    data = data.replace("</", r"<\/")  # which would end the script
    return f'<script id="files" type="application/json">{data}</script>' + "".join(
        f'<script src="assets/{script}"></script>' for script in scripts
    )


def format_composition():
    """Returns the choice of files to compose, for docs/assets/compose.js."""
    names = [STAGES[0], *BASES]
    docs = {file: ast.parse((ROOT / file).read_text()).body[0].end_lineno for file in names}
    data = format_data(
        names,
        ("lcs.js", "compose.js"),
        docs=docs,
        bases=BASES,
        pairs=read_pairs(),
    )
    return (
        '<div id="compose" data-search-exclude hidden>'
        '<label>Series <select><option value="">The stages and their recipes</option>'
        '<option value="gpt">The second series</option></select></label><fieldset></fieldset>'
        '<div class="diff highlight"><p class="caption"></p>'
        f'<div class="buttons"><button>Copy</button> <button>Save</button></div>{format_code("")}'
        f"</div></div>{data}"
    )


def recorded_source(file):
    """Returns the script of a recording, such as `multinode.py` or `fault 2: multigpu.py`."""
    fault = re.match(r"fault (\d+)", file)
    return FAULTS[int(fault[1]) - 1].source() if fault else (ROOT / file).read_text()


def format_recordings(files=(), more=""):
    """Returns what the ranks of files, by default all, do line by line, for assets/watch.js."""
    recordings = json.loads(RECORDINGS.read_text())
    recordings = {file: recordings[file] for file in files or recordings}
    lines = {}  # the HTML of each, which many files may have, and its number
    for file, recording in recordings.items():
        code = highlight_lines(recorded_source(file).splitlines(), "python")
        recording["code"] = [lines.setdefault(html, len(lines)) for html in code]
    data = json.dumps({"lines": list(lines), "files": recordings}).replace("</", r"<\/")
    return (
        f'<div class="watch" data-search-exclude hidden{more}>'
        f'<script type="application/json">{data}</script></div>'
    )


def format_recording(found):
    """Returns the folded recording of one file, that begins where its explanation says so."""
    player = format_recordings([found[1]], f' data-at="{escape(found[2])}"')
    return (
        '<details class="watching" data-search-exclude hidden><summary>Watch it run</summary>'
        f"{player}</details>"
    )


def format_choice():
    """Returns the choice of two files to compare, for docs/assets/diff.js."""
    files = [step.file for step in DOCUMENTED]
    options = ""
    for folder, name in FOLDERS.items():
        names = "".join(f"<option>{f}</option>" for f in files if f.rpartition("/")[0] == folder)
        options += f'<optgroup label="{name}">{names}</optgroup>'
    return (
        '<div id="compare" data-search-exclude hidden>'
        f"<label>From <select>{options}</select></label>"
        f"<label>to <select>{options}</select></label>"
        f'<div class="diff highlight"><p class="caption"></p>{format_code("")}</div></div>'
        + format_data(files, ("lcs.js", "diff.js"))
    )


FIELDS = (  # of the calculator: name, label, smallest and largest value, step, value at the start
    ("params", "Parameters, billions", 0.5, 2000, "any", 8),
    ("gpus", "GPUs", 1, 16384, 1, 64),
    ("gpu_memory", "GB per GPU", 8, 512, 1, 80),
    ("batch_size", "Samples per GPU", 1, 64, 1, 2),
    ("context", "Tokens per sample", 256, 262144, 1, 8192),
    ("loss_chunks", "Chunks of the loss", 1, 64, 1, 1),
)
CHECKBOXES = (
    ("recompute", "With recomputation, too"),
    ("compile", "Compile the loss"),
    ("llama", "Llama"),
)


def format_table(*columns):
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return f"<table class='calculated'><thead><tr>{head}</tr></thead><tbody></tbody></table>"


def format_calculator():
    """Returns the form and tables of docs/assets/calculator.js, and the constants of bench/."""
    fields = "".join(
        f'<div><label>{label} <input type="number" name="{name}" required min="{low}" '
        f'max="{high}" step="{step}" value="{value}"></label><input type="range" '
        f'aria-label="{label}" min="{math.log2(low)}" max="{math.log2(high)}" step="any"></div>'
        for name, label, low, high, step, value in FIELDS
    )
    fields += "<span>"
    for name, label in CHECKBOXES:
        checked = " checked" if name == "recompute" else ""
        fields += f'<label><input type="checkbox" name="{name}"{checked}> {label}</label> '
    constants = {"hardware": scaling.H100._asdict()}
    constants["BLOCK_TYPES"] = {name: b._asdict() for name, b in memory.BLOCK_TYPES.items()}
    for module in (memory, scaling, calculator):
        values = vars(module).items()
        constants |= {name: value for name, value in values if isinstance(value, int | float)}
    parts = memory.memory(memory.GPT(8e9, 1, 1, 1, 1), 1, 1)  # for their names
    return (
        '<div id="calculator" data-search-exclude hidden>'
        f'<script type="application/json">{json.dumps(constants)}</script>'
        f"<form>{fields}</span></form>"
        f'<p role="status"></p>{format_table("", "GB per GPU", "fits", "tokens/s")}'
        '<details><summary>The parts, in GB per GPU</summary><div class="scroll" tabindex="0">'
        f"{format_table('', *parts)}</div></details>"
        '</div><script src="assets/calculator.js"></script>'
    )


CHOICES = {
    "<!-- files -->": format_choice,
    "<!-- composition -->": format_composition,
    "<!-- recordings -->": format_recordings,
    "<!-- calculator -->": format_calculator,
}
RECORDING = r"<!-- watch (.*?\.py), (.*) -->"
PLAYER = '<script src="{}assets/watch.js"></script>'


class Sources(Preprocessor):
    """Names the file and the unit of each block, and appends the files that a page has diffs of."""

    def run(self, lines):
        """Returns the lines of a page, with what they lack."""
        text = "\n".join(lines)
        if lines[0].startswith("# "):
            time = f'<p class="reading-time" data-search-exclude>{reading_time(text)}</p>'
            text = "\n".join([lines[0], "", self.md.htmlStash.store(time), *lines[1:]])
        self.add_subtitle(dict.fromkeys(file for file, _ in re.findall(COG_FENCE, text)))
        text = re.sub(f"({COG_FENCE}diff .*)", r'\1 file="\2" unit="\3"', text)
        text = re.sub(f"({COG_FENCE}(?:python|bash))(?=\n)", r'\1 title="\2 · \3"', text)
        for file in dict.fromkeys(file for file, _ in re.findall(f"{COG_FENCE}diff ", text)):
            text += f"\n\n## {file} in full {{ data-search-exclude }}\n\n{link_to_diff(file)}\n\n"
            text += self.md.htmlStash.store(format_file(file))
        before = text
        for mark, format_page in CHOICES.items():
            if mark in text:
                text = text.replace(mark, self.md.htmlStash.store(format_page()))
        played = re.search(f"{RECORDING}|<!-- recordings -->", before)
        store = self.md.htmlStash.store
        text = re.sub(RECORDING, lambda found: store(format_recording(found)), text)
        if played:
            top = "../" * (played[1] or "").count("/")
            text += "\n\n" + store(PLAYER.format(top))
        return text.split("\n")

    def add_subtitle(self, files):
        """Puts the names of a page's scripts below its title in the sidebar, if Zensical builds."""
        scripts = [file for file in files if file.endswith(".py")]
        context = next((step for step in self.md.preprocessors if hasattr(step, "page")), None)
        if scripts and context:
            names = " and ".join(script.rpartition("/")[2] for script in scripts)
            context.page.meta["subtitle"] = names


def mark_indents(found):
    """Returns a block of code whose lines each tell how far they are indented, as in a diff."""
    rows = []
    for line in found[2].splitlines(keepends=True):
        text = unescape(re.sub("<.*?>", "", line))
        indent = re.match(r"(>>> |\.\.\. )? *", text).end()
        rows.append(f'<span class="line" style="--indent: {indent}ch">{line}</span>')
    return found[1] + "".join(rows) + found[3]


def mark_options(found):
    return re.sub(r"(?<![\w-])--[\w-]+", r'<span class="option">\g<0></span>', found[0])


class Wrapping(Postprocessor):
    """Marks the indents of code, and each option in the prose, which no line may end within."""

    def run(self, text):
        """Returns the HTML of a page with both."""
        return INLINE_CODE.sub(mark_options, CODE_BLOCK.sub(mark_indents, text))


class SourcesExtension(Extension):
    """Adds `Sources` and `Wrapping` to Markdown's steps."""

    def extendMarkdown(self, md):  # noqa: N802, Markdown's name
        """Does so, as Markdown asks an extension to do."""
        md.preprocessors.register(Sources(md), "sources", 28)  # before superfences, at 25
        md.postprocessors.register(Wrapping(md), "wrapping", 5)  # after "raw_html", at 30


def makeExtension(**kwargs):  # noqa: N802, Markdown's name
    """Returns the extension that this module is."""
    return SourcesExtension(**kwargs)
