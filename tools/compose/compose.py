"""What composes one script of several files: `python -m tools.compose` calls it.

Each brings what it changes in the nearest file that it and those before it build on.
"""

import ast
import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tools.compose import names, resolutions
from tools.compose.merge import diff, merge
from tools.judge import stages
from tools.steps import ALL, ROOT, STAGES

BASES = {step.file: step.base for step in ALL if step.file.endswith(".py")}  # __main__ adds yours
FILES = [STAGES[0], *BASES]
PAIRS = Path(__file__).with_name("pairs.json")  # which are proven, by tests/tools/test_pairs.py
OLD = {}  # the text of an old version, by its name, such as multinode.py@1.0
parse = functools.cache(ast.parse)  # a file is in many pairs


def fail(message):
    print(f"compose: {message}", file=sys.stderr)
    sys.exit(2)


def ancestors(file):
    """Returns a file and what it builds on, the nearest first."""
    return [file, *ancestors(BASES[file])] if file in BASES else [file]


def name_of(path):
    """Returns the name of a file in the series, or the path of another."""
    full = path.resolve()
    return str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else str(full)


def read_pairs():
    """Returns what is known of each two files: the table has each verdict once, above its files."""
    return {
        f"{first} + {other}": known
        for known, files in json.loads(PAIRS.read_text()).items()
        for first, others in files.items()
        for other in others.split()
    }


def pairs(parts):
    """Returns what is known of each two of the parts: proven, conflict or a reason against it.

    A script of one's own stands for the file that it was copied from.
    """
    known = read_pairs()
    files = sorted((part if part in FILES else BASES[part] for part in parts), key=FILES.index)
    chosen = itertools.combinations(files, 2)
    return {
        pair: known.get(" + ".join(pair)) for pair in chosen if pair[0] not in ancestors(pair[1])
    }


def source_of(file):
    return OLD.get(file) or (ROOT / file).read_text()


def split(file):
    """Returns the lines of a file's docstring, and of its code."""
    try:
        text = source_of(file)
        tree = parse(text, file)
    except (SyntaxError, ValueError) as error:  # or no text
        fail(f"cannot read {file}: {error}")
    end = tree.body[0].end_lineno if ast.get_docstring(tree) else 0
    lines = text.removesuffix("\n").split("\n")  # splitlines would split at a form feed, too
    return lines[:end], [(line, file) for line in lines[end:]]


def read(file, name):
    """Returns the lines of a file's docstring, of its code, and its arguments in the docstring.

    There it gets another name, and no arguments beyond 50 10.
    """
    lines, code = split(file)
    names = [file] if file in FILES else [file, Path(file).name, BASES[file]]
    command = re.compile(rf"(?<=\s)({'|'.join(map(re.escape, names))}) 50 10(.*)")
    doc = [(command.sub(lambda _: f"{name} 50 10", line), file) for line in lines]
    found = [match[2].strip() for match in map(command.search, lines) if match]
    arguments = [(f"        {text}", file) for text in found if text]
    return doc, code, arguments


def fold(parts, lines, resolve):
    """Merges the lines of the parts, one after the other."""
    result, known = lines[parts[0]], ancestors(parts[0])
    for part in parts[1:]:
        base = next(file for file in ancestors(part) if file in known)
        old = [(text, None) for text, _ in lines[base]]
        result = merge(old, result, lines[part], functools.partial(resolve, part))
        known += ancestors(part)
    return result


def mark(part, old, ours, theirs):
    """Returns how a conflict was resolved, or its sides and what both replace, as git's diff3."""
    if (known := resolutions.find(part, old, ours, theirs)) is not None:
        return known
    first = " and ".join(dict.fromkeys(name for _, name in ours if name)) or "the others"
    start, base, middle = (f"<<<<<<< {first}", None), ("||||||| before", None), ("=======", None)
    return [start, *ours, base, *old, middle, *theirs, (f">>>>>>> {part}", None)]


@functools.cache
def meet(parts):
    """Returns the lines of a merge in this order, and both sides of each of its conflicts."""
    code = {file: split(file)[1] for part in parts for file in ancestors(part)}
    met = []

    def resolve(part, old, ours, theirs):
        met.append([ours, theirs])
        return mark(part, old, ours, theirs)

    return fold(parts, code, resolve), met


def is_met(known):
    """Tells whether the files of a resolution, in some order, still have what it settles."""
    merges = map(meet, itertools.permutations(known.parts))
    if len(known.sides) == 1:
        return any(len(resolutions.places(lines, known.sides[0])) == 1 for lines, _ in merges)
    return any(
        all(map(resolutions.places, sides, wanted))
        for _, conflicts in merges
        for sides in conflicts
        for wanted in itertools.permutations(known.sides)
    )


def merge_order(parts):
    """Returns them after what they build on, where resolutions are written for that."""
    files = {file for part in parts for file in ancestors(part)}
    met = {file for known in resolutions.read() if {*known.parts} <= files for file in known.parts}
    more = [file for part in parts for file in ancestors(part)[1:] if file in met]
    order = dict.fromkeys([*more, *parts])
    return sorted(order, key=lambda file: len({*ancestors(file)[1:]} & {*more}))


def compose(parts, name):
    """Returns the lines of one script, `name`, that does what all of the parts do."""
    files = {file: read(file, name) for part in parts for file in ancestors(part)}
    # Of the docstrings that differ, that of the part with most stages: it says how ranks start.
    lead = max(parts, key=lambda part: len({*ancestors(part)} & {*STAGES}))
    docs = {file: doc for file, (doc, _, _) in files.items()}
    order = [lead, *(part for part in parts if part != lead)]
    doc = fold(order, docs, lambda part, old, ours, theirs: ours)
    # A script of one's own stays first.
    order = merge_order(order) if parts[0] in FILES else parts
    code = fold(order, {file: code for file, (_, code, _) in files.items()}, mark)
    code = resolutions.replace(files, code)
    result = []
    for line in doc[:-1]:
        lines = [line]
        if line[0].endswith(f" {name} 50 10"):
            lines += [line for part in parts for line in files[part][2]]
        result += [(f"{text} \\", part) for text, part in lines[:-1]] + lines[-1:]
    if len(doc) > 1:
        result += [("Composed of:", None)] if "Composed of:" not in dict(result) else []
        result += [(f"    {part}", part) for part in parts]
    return result + doc[-1:] + code


def find_problems(parts, lines):
    """Yields a line on what is no conflict of lines, in a script of these parts."""
    base = next(f for f in ancestors(parts[0]) if all(f in ancestors(part) for part in parts))
    sources = {part: source_of(part) for part in parts}
    yield from names.find_problems(lines, sources, source_of(base))
    files = [file for part in parts for file in ancestors(part)]
    entries = resolutions.replacements(files)
    for known in entries:
        is_general = any(
            {*known.parts} < {*other.parts} and {*known.sides[0]} & {*other.sides[0]}
            for other in entries
        )
        if not is_general and not resolutions.places(lines, known.lines):
            yield f"{' + '.join(known.parts)} need this, and no place is found: {known.lines[0]}"
    if parts[0] not in FILES:
        old = source_of(BASES[parts[0]])
        saving = [line for line in old.splitlines() if "state_dict(" in line]
        for part in parts[1:]:
            if not {*saving} <= {*sources[part].splitlines()}:
                yield from names.lines_to_look_at(parts[0], sources[parts[0]], old, part)


def git(*arguments):
    """Returns what git prints, or "" if it fails."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout


def read_old(name):
    """Returns multinode.py@VERSION: of a revision, or of the commit that wrote it in CHANGELOG."""
    file, _, version = name.partition("@")
    revision = git("rev-parse", "-q", "--verify", "--end-of-options", f"{version}^{{commit}}")
    if not revision and git("rev-parse", "--is-shallow-repository").strip() == "true":
        fail(f"--base {name}: this clone is shallow: type git fetch --unshallow")
    if not revision:
        heading = f"^## {re.escape(version)} "
        revision = git("log", "--reverse", "--format=%H", "-G", heading, "--", "CHANGELOG.md")
    if not revision:
        fail(f"--base {name}: git knows no such revision, nor CHANGELOG.md such a version")
    text = git("show", f"{revision.split()[0]}:{file}")
    return text or fail(f"--base {name}: there was no {file} then")


def nearest_version(own, base, old):
    """Returns the version of a file from which fewest lines of one's own differ: mostly `old`."""
    lines = Counter(source_of(own).splitlines())

    def distance(version):
        file, _, revision = version.partition("@")
        text = OLD.get(version) or git("show", f"{revision}:{file}")
        other = Counter(text.splitlines())
        return (lines - other).total() + (other - lines).total()

    revisions = git("log", "--format=%h", "--", base).split()
    return min([old, *(f"{base}@{revision}" for revision in revisions)], key=distance)


def upgrade(own, base, old):
    """Returns the lines of one's own script, with what has changed in its base since `old`."""
    BASES.update(dict.fromkeys((own, base), old))
    OLD[old] = read_old(old)
    docs, code = {}, {}
    for file in (own, base, old):
        doc, code[file] = split(file)
        docs[file] = [(line, file) for line in doc]
    changed = sum(sign != " " for sign, _ in diff(code[old], code[base]))
    print(f"{base} has {changed} changed lines since {old.partition('@')[2]}")
    nearest = nearest_version(own, base, old)
    if nearest != old:
        print(f"{own} is nearer to another version: is it a copy of {nearest}?")
    doc = fold([own, base], docs, lambda part, old, ours, theirs: ours)
    return doc + fold([own, base], code, mark)


def series(file):
    """Returns the folder of a file's series, or "" for the stages and recipes."""
    folders = [name.partition("/")[0] for name in ancestors(file)]
    return next((folder for folder in ("gpt", "by_hand") if folder in folders), "")


def check_choice(parts):
    """Ends with a line if these files are known to make no script."""
    for part, other in itertools.permutations(parts, 2):
        if part == other:
            fail(f"{part} is named twice")
        if part in ancestors(other):
            fail(f"{other} contains {part}, on which it builds: leave {part} out")
        if series(part) != series(other):
            fail(f"{part} and {other} are of different series")
    for (part, other), known in pairs(parts).items():
        if known not in (None, "proven", "conflict"):
            fail(f"{part} and {other} do not go together: {known}")


def judge(parts, output):
    """Has the judge of `make check` look at the script; returns how many of its checks fail."""
    from tools.judge import checks  # imports torch, for which a mistake need not wait

    judged = [stages.STAGES[part.removesuffix(".py")] for part in parts]
    lead = max(judged, key=lambda stage: stage.processes)
    checks_of_all = lead.checks.split()
    if lead.reference:  # of the second series, whose files differ in what can be seen from outside
        checks_of_all = [c for c in checks_of_all if all(c in s.checks.split() for s in judged)]
    stages.STAGES["composed"] = lead._replace(
        checks=" ".join(checks_of_all),
        options=" ".join(stage.options for stage in judged),
        max_diff=max(stage.max_diff for stage in judged),
        reference=max((stage.reference for stage in judged), key="gpt/pretrain.py".__ne__),
    )
    with tempfile.TemporaryDirectory() as folder:
        return len(checks.judge("composed", output, checks.toy_task, Path(folder)))
