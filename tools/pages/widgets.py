"""What the scripts of docs/assets need in a page: forms, and the data that they show."""

import base64
import gzip
import json
import math
from html import escape

from tools.compose.compose import ancestors, compose, read_pairs
from tools.formulas import calculator, memory, scaling
from tools.pages.diffs import format_code, highlight_lines
from tools.pages.fences import DOCUMENTED, language_of
from tools.steps import PORTS, ROOT
from tools.watch.recordings import RECORDINGS, recorded_source

FOLDERS = {
    "": "The stages",
    "recipes": "Recipes",
    "by_hand": "By hand",
    "gpt": "The second series",
    "slurm": "Job files",
    "ports": "Your own script",
}


def pack(data):
    """Returns the element that holds data for unpack() of docs/assets/unpack.js."""
    packed = base64.b64encode(gzip.compress(json.dumps(data).encode(), mtime=0)).decode()
    return f'<script type="application/gzip">{packed}</script>'


def format_data(texts, script, **more):
    """Returns what a script of docs/assets needs: each line of some texts, once, and `more`."""
    lines, files = {}, {}  # the number and the HTML of each line; the numbers of each text's lines
    for name, text in texts.items():
        if not lines.keys() >= {*text}:
            for line, html in zip(text, highlight_lines(text, language_of(name)), strict=False):
                lines.setdefault(line, (len(lines), html))
        files[name] = [lines[line][0] for line in text]
    data = pack({"lines": [html for _, html in lines.values()], "files": files} | more)
    scripts = ("unpack.js", script)
    return data + "".join(f'<script src="assets/{name}"></script>' for name in scripts)


def format_options(files):
    """Returns the options of a choice among files, by folder."""
    options = ""
    for folder, name in FOLDERS.items():
        names = "".join(f"<option>{f}</option>" for f in files if f.rpartition("/")[0] == folder)
        options += f'<optgroup label="{name}">{names}</optgroup>' if names else ""
    return options


def format_composition():
    """Returns the choice of two files, and the script of each pair, for docs/assets/compose.js."""
    known = read_pairs()
    texts, sources = {}, {}
    for pair in [pair for pair, verdict in known.items() if verdict == "proven"]:
        parts = pair.split(" + ")
        script = compose(parts, "my_training.py")
        texts[pair] = [line for line, _ in script]
        # The number of the file that a line comes from, or a blank.
        of_file = {file: str(n) for n in (1, 0) for file in ancestors(parts[n])} | {None: " "}
        sources[pair] = "".join(of_file[file] for _, file in script)
    conflict = {"conflict": "changes the same lines"}
    reasons = {pair: conflict.get(why, why) for pair, why in known.items() if pair not in texts}
    files = dict.fromkeys(file for pair in known for file in pair.split(" + "))
    return (
        '<div id="compose" data-search-exclude hidden>'
        f"<label>Compose <select>{format_options(files)}</select> with</label>"
        '<fieldset aria-label="the second file"></fieldset>'
        '<div class="diff highlight"><p class="caption"></p>'
        f'<div class="buttons"><button>Copy</button> <button>Save</button></div>{format_code("")}'
        f"</div></div>{format_data(texts, 'compose.js', sources=sources, reasons=reasons)}"
    )


def format_recordings(files=(), more=""):
    """Returns what the ranks of files, by default all, do line by line, for assets/watch.js."""
    recordings = json.loads(RECORDINGS.read_text())
    recordings = {file: recordings[file] for file in files or recordings}
    lines = {}  # the HTML of each, which many files may have, and its number
    for file, recording in recordings.items():
        code = highlight_lines(recorded_source(file).splitlines(), "python")
        recording["code"] = [lines.setdefault(html, len(lines)) for html in code]
    data = pack({"lines": list(lines), "files": recordings})
    return f'<div class="watch" data-search-exclude hidden{more}>{data}</div>'


def format_recording(found):
    """Returns the folded recording of one file, that begins where its explanation says so."""
    player = format_recordings([found[1]], f' data-at="{escape(found[2])}"')
    return (
        '<details class="watching" data-search-exclude hidden><summary>Watch it run</summary>'
        f"{player}</details>"
    )


def format_choice():
    """Returns the choice of two files to compare, for docs/assets/diff.js."""
    files = [step.file for step in DOCUMENTED] + [step.base for step in PORTS]
    options = format_options(files)
    texts = {file: (ROOT / file).read_text().splitlines() for file in files}
    return (
        '<div id="compare" data-search-exclude hidden>'
        f"<label>From <select>{options}</select></label>"
        f"<label>to <select>{options}</select></label>"
        f'<div class="diff highlight"><p class="caption"></p>{format_code("")}</div></div>'
        + format_data(texts, "diff.js")
    )


FIELDS = (  # of the calculator: name, label, smallest and largest value, step, value at the start
    ("params", "Parameters, billions", 0.5, 2000, "any", 8),
    ("gpus", "GPUs", 1, 16384, 1, 64),
    ("gpu_memory", "GB per GPU", 8, 512, 1, 80),
    ("batch_size", "Samples per GPU", 1, 64, 1, 2),
    ("context", "Tokens per sample", 256, 262144, 1, 8192),
    ("loss_chunks", "Chunks of the loss", 1, 64, 1, 1),
    ("tokens", "Tokens, billions", 0.001, 100_000, "any", 160),
    ("price", "Price of a GPU hour", 0.01, 100, "any", 2),
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
    """Returns the form and tables of docs/assets/calculator.js, and the formulas' constants."""
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
    columns = ("", "GB per GPU", "fits", "tokens/s", "hours", "GPU hours", "cost")
    parts = memory.memory(memory.GPT(8e9, 1, 1, 1, 1), 1, 1)  # for their names
    return (
        '<div id="calculator" data-search-exclude hidden>'
        f'<script type="application/json">{json.dumps(constants)}</script>'
        f"<form>{fields}</span></form>"
        '<p role="status"></p><div class="scroll" tabindex="0">'
        f"{format_table(*columns)}</div>"
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
