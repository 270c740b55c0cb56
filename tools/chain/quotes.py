"""What quotes lines of the series' files: `make cascade` has it follow an edit of these lines.

`make docs` names what is stale in tools/edits/, resolutions.diff and exercises.txt.
"""

import functools
import re
from difflib import SequenceMatcher

from tools import edits
from tools.compose import compose, resolutions
from tools.steps import ALL, PORTS, ROOT
from tools.units.stored import digests, load, write
from tools.units.stored import split as split_digests

BASES = {step.file: step.base for step in ALL + PORTS}
FILES = list(dict.fromkeys([*BASES.values(), *BASES]))
FILLED = re.compile(r"^<!-- \[\[\[cog.*?^<!-- \[\[\[end\]\]\] -->$", re.DOTALL | re.MULTILINE)
SEARCHED = ("*.md", "*.py", "tools/learn/*.txt")
NEWLINE = "\n"  # in an f-string, as Python 3.11 wants it
MIN_LENGTH = 20  # of a line that tells its file from others


def has_conflict(file):
    return "\n<<<<<<< " in (ROOT / file).read_text()


def lines_of(file):
    return (ROOT / file).read_text().splitlines()


def lines_outside(pattern, text):
    """Yields the number and the text of each line; those that match have none."""
    rest = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    yield from enumerate(rest.splitlines(), 1)


@functools.cache
def edits_of(file):
    """Returns the old and the new lines of each uncommitted edit of a file, none of a new one.

    As many new as old ones count one by one; an insertion is known by the lines around it.
    """
    old = compose.git("show", f"HEAD:{file}").splitlines()
    new = lines_of(file)
    found = []
    for kind, i, end, j, new_end in SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "insert":
            i, end, j, new_end = max(i - 1, 0), end + 1, max(j - 1, 0), new_end + 1
        if kind != "equal" and end - i == new_end - j:
            found += [([a], [b]) for a, b in zip(old[i:end], new[j:new_end], strict=True)]
        elif kind != "equal" and old:
            found.append((old[i:end], new[j:new_end]))
    return found


def quotable(line):
    """Returns what a page may quote of a line: all of it, and the parts of its texts between {}."""
    texts = re.findall(r'"([^"]*)"', line)
    parts = [part.strip() for text in texts for part in re.split(r"{[^}]*}", text)]
    return [line.strip(), *parts]


def signed(sign, lines):
    return [sign + line for line in lines]


def signed_digests(sign, lines):
    """Returns the digests that units.json has of lines, which are none for blank ones."""
    return digests(signed(sign, filter(str.strip, lines)))


def follow(lines, file, quote=list):
    """Returns quoted lines of a file with its edits; `quote` is how lines are quoted there."""
    for edit in edits_of(file):
        old, new = map(quote, edit)
        i = 0
        while old and i + len(old) <= len(lines):
            if lines[i : i + len(old)] == old:
                lines = [*lines[:i], *new, *lines[i + len(old) :]]
                i += len(new)
            else:
                i += 1
    return lines


def problem_of_edit(text):
    return edits.parse(text).problem()


def carry_into_edit(text):
    lines = text.split("\n")
    for path in edits.parse(text).files():
        for sign in " -+":
            quote = functools.partial(signed, sign)
            lines = follow(lines, str(path.relative_to(ROOT)), quote)
    carried = "\n".join(lines)
    return text if problem_of_edit(carried) else carried


def problem_of_resolution(text):
    for known in resolutions.parse(text):
        if not compose.is_met(known):
            files = " + ".join(known.parts)
            return f"write anew what {files} become: gone is {known.sides[0][0].strip()}"


def carry_into_resolution(text):
    header, diff = text.split("\n", 1)
    hunks = diff.split("\n@@\n")
    for n, hunk in enumerate(hunks):
        (known,) = resolutions.parse(f"{header}\n{hunk}")
        lines = hunk.split("\n")
        for file in dict.fromkeys(file for part in known.parts for file in compose.ancestors(part)):
            for sign in " -+":
                lines = follow(lines, file, functools.partial(signed, sign))
        carried = "\n".join(lines)
        (now,) = resolutions.parse(f"{header}\n{carried}")
        if now.lines != known.lines:  # else the edited line is gone there, and a person is to look
            hunks[n] = carried
    return f"{header}\n" + "\n@@\n".join(hunks)


def problem_of_exercises(text):
    stage, *exercises = text.splitlines()
    script = (ROOT / f"{stage}.py").read_text()
    for name in re.findall(r"^fill (.+) \| ", "\n".join(exercises), re.MULTILINE):
        if name not in script:
            return f"{name!r} is not in {stage}.py"


def carry_into_answers():
    """Lets an edited line keep its unit, with the sentence and the test."""
    units = load()
    for file, unit in ((file, unit) for file, known in units.items() for unit in known):
        lines = split_digests(unit["lines"])
        for sign, source in (("-", BASES[file]), ("+", file)):
            lines = follow(lines, source, functools.partial(signed_digests, sign))
        unit["lines"] = "".join(lines)
    write(units)


split = functools.partial(re.split, flags=re.MULTILINE)
QUOTES = [  # a file, what each of its parts begins with, and how one is checked and carried
    *(
        (path, r"^(?=what: )", problem_of_edit, carry_into_edit)
        for path in sorted(edits.FOLDER.glob("*.diff"))
    ),
    (resolutions.PATH, r"^(?=where: )", problem_of_resolution, carry_into_resolution),
    (ROOT / "tools/learn/exercises.txt", r"(?<=\n\n)", problem_of_exercises, str),
]


def stale():
    """Yields where a part no longer fits the files that it quotes, and why."""
    for path, separator, problem, _ in QUOTES:
        before, *texts = split(separator, path.read_text())
        for text in texts:
            if said := problem(text):
                yield f"{path.relative_to(ROOT)}:{1 + before.count(NEWLINE)}: {said}"
            before += text


def carry():
    """Carries uncommitted edits into what quotes their old lines; yields what is left to do."""
    for path, separator, problem, carry_into in QUOTES:
        first, *texts = split(separator, path.read_text())
        texts = [carry_into(text) if problem(text) else text for text in texts]
        path.write_text("".join([first, *texts]))
    carry_into_answers()
    resolutions.read.cache_clear()
    compose.meet.cache_clear()
    yield from stale()
    now = {part for file in FILES for line in lines_of(file) for part in quotable(line)}
    changed = {}  # what is gone, and what stands in its place
    for old, new in (edit for file in FILES for edit in edits_of(file)):
        parts, new_parts = (
            [part for line in side for part in quotable(line)] for side in (old, new)
        )
        same = len(parts) == len(new_parts)
        changed |= dict(zip(parts, new_parts if same else [None] * len(parts), strict=True))
    changed = {part: new for part, new in changed.items() if len(part) >= MIN_LENGTH}
    yield from carry_into_pages({part: changed[part] for part in changed.keys() - now})


def carry_into_pages(changed):
    """Writes the new text where a page or a test quotes the old one, or yields the line."""
    for name in compose.git("ls-files", *SEARCHED).split():
        path = ROOT / name
        if name in FILES or not path.exists():
            continue
        before = text = path.read_text()
        for old in sorted(filter(changed.get, changed), key=len, reverse=True):
            text = text.replace(old, changed[old])
        if text != before:
            path.write_text(text)
        for number, line in lines_outside(FILLED, text):
            if any(old in line for old, new in changed.items() if new is None):
                yield f"{name}:{number}: quotes a line that has changed: {line.strip()}"
