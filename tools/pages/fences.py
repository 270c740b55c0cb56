"""Cuts the code blocks of README and docs from the files: `cog` calls these functions there.

    <!-- [[[cog fence("multigpu.py", "Trainer.__init__") ]]] -->

A unit is what one block shows: in Python the docstring, the imports, the constants, each function,
each class, of long ones each method, and the last lines; in a job file each paragraph, the first
three of which are `header`, `setup` and `launch`, the others named by their first command.
"""

import ast
import difflib
import functools
import itertools
import re
import sys
import textwrap
from pathlib import Path

from tools.edits import read
from tools.steps import (
    ALL,
    GPT,
    JOB_STEPS,
    PORTS,
    ROOT,
    STEPS,
    Step,
    changed_lines,
)

START = [Step(None, steps[0].base, 0) for steps in (STEPS, JOB_STEPS)]
DOCUMENTED = START + ALL + PORTS
STATEMENTS = {  # what their units are called; functions and classes have names of their own
    ast.Expr: "docstring",
    ast.Import: "imports",
    ast.ImportFrom: "imports",
    ast.Assign: "constants",
    ast.If: "__main__",
}
MAX_UNIT_LINES = 75  # a class up to this length is one unit
MAX_REMOVED_LINES = 12  # of a unit that a step drops whole: of a longer one, the first is shown
CONTEXT_LINES = 2  # unchanged ones around a changed one


def first_line(node):
    """Returns the index of the first line of a statement, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1


def starts(tree):
    """Yields the name and the first line of each statement, and of each method of a long class."""
    for node in tree.body:
        name = STATEMENTS.get(type(node)) or node.name
        yield name, first_line(node)
        if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= MAX_UNIT_LINES:
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            yield from ((f"{name}.{method.name}", first_line(method)) for method in methods)


def python_units(text):
    """Returns the units of a Python file: their names and lines, in their order."""
    named = itertools.groupby(starts(ast.parse(text)), key=lambda start: start[0])
    firsts = [next(group) for _, group in named]  # of the statements in a row that are one unit
    lines = text.splitlines()
    ends = [start for _, start in firsts[1:]] + [len(lines)]
    units = {}
    for (name, start), end in zip(firsts, ends, strict=True):
        if name in units:
            raise ValueError(f"two places are {name!r}: put them together")
        units[name] = lines[start:end]
    return units


def shell_units(text):
    """Returns the units of a job file: their names and lines, in their order."""
    units, names = {}, ["header", "setup", "launch"]
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.splitlines()
        command = next((line.strip() for line in lines if not line.strip().startswith("#")), "")
        name = names.pop(0) if names else re.match(r"[\w-]+( [\w-]+)?", command)[0]
        if name in units:
            raise ValueError(f"two paragraphs begin with {name!r}: begin one with another command")
        units[name] = [*lines, ""]
    return units


@functools.cache
def units(file):
    """Returns the units of a file of this repository."""
    cut = python_units if file.endswith(".py") else shell_units
    try:
        return cut((ROOT / file).read_text())
    except FileNotFoundError:
        raise ValueError(f"tools/steps.py lists {file}, which is missing") from None
    except SyntaxError as error:
        raise ValueError(f"{file}:{error.lineno}: {error.msg}; is a conflict left?") from None


def stripped(lines):
    return "\n".join(lines).strip("\n").splitlines()


def diff(old, new):
    """Returns the changed lines with their context, of lists of lines; a gap between them as @@."""
    changes = difflib.unified_diff(stripped(old), stripped(new), n=CONTEXT_LINES, lineterm="")
    lines = ["@@" if line.startswith("@@") else line for line in list(changes)[3:]]
    # Blank lines at a hunk's edges tell nothing.
    edges = {"@@", None}
    around = zip([None, *lines], lines, [*lines[1:], None], strict=False)
    return [line for a, line, b in around if line != " " or not edges & {a, b}]


def changed_units(step):
    """Returns what the blocks of a step show: a name and lines for each unit that it changes.

    A step without a base is no diff, and is shown whole.
    """
    new = units(step.file)
    if not step.base:
        return {name: stripped(lines) for name, lines in new.items()}
    old = units(step.base)
    diffs = {name: diff(old.get(name, []), new.get(name, [])) for name in [*new, *old]}
    for name in old.keys() - new.keys():
        if len(old[name]) > MAX_REMOVED_LINES:
            diffs[name] = [diffs[name][0], "-    ..."]
    return {name: lines for name, lines in diffs.items() if lines}


def marked_units(file):
    """Yields each unit of a file: its name, and its lines, with a + where its step adds them."""
    old = units(step_to(file).base)
    for name, new in units(file).items():
        changes = difflib.unified_diff(old.get(name, []), new, n=len(new), lineterm="")
        lines = list(changes)[3:] or [f" {line}" for line in new]
        yield name, [line for line in lines if not line.startswith("-")]


def language_of(file):
    return "python" if file.endswith(".py") else "bash"


def step_to(file):
    """Returns the step whose outcome is `file`; one that is no diff has no base."""
    return next((step for step in DOCUMENTED if step.file == file), Step(None, file, 0))


def block(file, unit):
    """Returns the Markdown of the block of one unit of the step to `file`."""
    step = step_to(file)
    changed = changed_units(step)
    if unit not in changed:
        raise ValueError(f"the step to {file} changes no {unit!r}, but {', '.join(changed)}")
    code = language_of(file)
    language = f'diff lang="{code}"' if step.base else code
    return "\n".join(["```" + language, *changed[unit], "```"])


def named(fill):
    """Lets what fills a block name its place, for `make docs`, if it fails."""

    @functools.wraps(fill)
    def fill_or_fail(*args):
        try:
            fill(*args)
        except (OSError, SyntaxError, ValueError) as error:
            if "cog" not in sys.modules:
                raise
            cog = sys.modules["cog"]
            cog.error(f"{cog.inFile}:{cog.firstLineNum}: {error}")

    return fill_or_fail


@named
def fence(file, unit):
    """Prints the block of one unit, where cog picks it up."""
    print(block(file, unit))


@named
def essential(file, *texts):
    """Prints a block of changed lines of the step to `file`: those that contain `texts`.

    Each text must be in exactly one. Where lines are left out, a mark names the unit that follows;
    the lines below a mark lose the indent that they share.
    """
    units_of_lines, lines = [], []
    for unit, changed in changed_units(step_to(file)).items():
        lines += ["@@", *changed]
        units_of_lines += [unit] * (1 + len(changed))
    chosen = set()
    for text in texts:
        found = [i for i, line in enumerate(lines) if line[:1] in ("+", "-") and text in line]
        if len(found) != 1:
            raise ValueError(f"{len(found)} changed lines of {file} contain {text!r}, not one")
        chosen.add(found[0])
    shown, unit = [], None
    for start in sorted(index for index in chosen if index - 1 not in chosen):
        end = next(index for index in itertools.count(start) if index not in chosen)
        code = textwrap.dedent("\n".join(line[1:] for line in lines[start:end])).splitlines()
        shown.append("@@" if units_of_lines[start] == unit else f"@@ {units_of_lines[start]} @@")
        shown += [line[0] + rest for line, rest in zip(lines[start:end], code, strict=True)]
        unit = units_of_lines[start]
    print("```diff", *shown, "```", sep="\n")


@named
def faulty(number):
    """Prints the functions of a faulty script that its edits have changed, for docs/faults.md."""
    fault = read("faults")[number - 1]
    before = units(f"{fault.stage}.py")
    changed = [
        textwrap.dedent("\n".join(lines)).strip("\n")
        for name, lines in python_units(fault.source()).items()
        if lines != before[name]
    ]
    print("```python", "\n\n\n".join(changed), "```", sep="\n")


@named
def line_numbers(text):
    """Prints a text of docs/errors.md, with numbers of lines in copies of multinode.py."""
    lines = (ROOT / "multinode.py").read_text().splitlines()
    for method, start in [("_save_snapshot", "snapshot = {"), ("_run_batch", "loss.backward()")]:
        number = lines.index(f"        {start}") + 1  # in barrier.py, too
        text = re.sub(rf"(?<={method} \(barrier\.py:)\d+", str(number), text)
        text = re.sub(rf"\d+(?= in {method})", str(number + 2), text)  # timer.py has two more above
    print(text, end="")


@named
def table(folder, written):
    """Prints the table of a folder's files, for its index: a new row has the title of its page."""
    known = re.findall(r"^(\| \[`(\w+)\.py`\].*?\|.*?\|)", written, re.M)
    rows = {name: row for row, name in known if "TODO" not in row}
    print("\n| file | what it adds | built on | changed lines |\n|---|---|---|---|")
    for step in ALL:
        name = Path(step.file).stem
        if not step.file.startswith(f"{folder}/"):
            continue
        if name not in rows:
            page = ROOT / "docs" / folder / f"{name}.md"
            if not page.exists():
                raise ValueError(f"write docs/{folder}/{name}.md, the page of {step.file}")
            title = page.read_text().partition("\n")[0]
            rows[name] = f"| [`{name}.py`]({name}.md) | {title.removeprefix('# ')} |"
        print(rows[name], f"`{step.base}` |", changed_lines(step.base, step.file), "|")
    print()


def branches(file):
    """Yields a line for each file of gpt/ that builds on `file`, above what builds on that one."""
    files = [step.file for step in GPT if step.base == file]
    for name in files:
        last = name == files[-1]
        yield f"{'└── ' if last else '├── '}{name}"
        yield from (f"{'    ' if last else '│   '}{line}" for line in branches(name))


@named
def tree(root):
    """Prints which file of gpt/ builds on which, for its index."""
    print("```", root, *branches(root), "```", sep="\n")
