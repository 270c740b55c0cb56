"""The exercises of `make learn`, as exercises.txt lists them.

They are made of what is there: the faults that prove the judge, the units of each diff, the hints
of the pages, the explanations of the checks. What needs torch is imported where it is used.
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tools.edits import read
from tools.judge.stages import STAGES
from tools.steps import ALL, ROOT
from tools.units.cut import Cut
from tools.units.stored import digests, load, split

GAP = "# FILL IN"


def functions(source):
    """Returns the name and the code of each function."""
    nodes = ast.walk(ast.parse(source))
    return {(node.name, ast.unparse(node)) for node in nodes if isinstance(node, ast.FunctionDef)}


@dataclass(frozen=True)
class Exercise:
    stage: str
    number: int  # of those of its stage
    name: str

    @property
    def kind(self):
        return type(self).__name__.lower()

    @property
    def key(self):
        """Returns what it is called once it is passed."""
        return f"{self.stage} {self.kind} {self.name}"

    @property
    def place(self):
        """Returns what it is called before, when its name would give it away."""
        return f"{self.stage} {self.number}"


@dataclass(frozen=True)
class Predict(Exercise):
    """A question about a run, which then answers it."""

    about: str
    choices: str  # separated by commas, or "a number"
    task: str
    why: str

    def answer(self):
        from tools.learn import predictions

        return getattr(predictions, self.name)()


@dataclass(frozen=True)
class FileExercise(Exercise):
    """A script to be edited until the judge has nothing against it."""

    text: str

    @property
    def about(self):
        return f'docs/{self.stage}.md, and "{self.check}" in docs/check.md'

    @property
    def script(self):
        return f"{self.stage}.py"

    @property
    def check(self):
        """Returns the check that it is about."""
        return self.text

    def path(self, folder):
        return folder / self.stage / f"{self.kind}_{self.number}.py"

    def write(self, folder):
        """Writes its file, unless the learner has it already; returns the path."""
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(self.source())
        return path

    def hints(self, folder):
        from tools.judge.checks import explanation

        # That of "starts" is about everything that may stop a script.
        general = [] if self.check == "starts" else [": ".join(explanation(self.check))]
        answer = f"diff -U0 {self.path(folder)} {self.script}"
        return [*general, *self.own_hints(), f"The answer: {answer}"]

    def own_hints(self):
        return []


class Repair(FileExercise):
    """A fault of tools/edits/faults.diff."""

    @property
    def fault(self):
        return next(f for f in read("faults") if (f.stage, f.what) == (self.stage, self.name))

    @property
    def check(self):
        """Returns the first check that fails on it and that needs no launcher, which takes long."""
        return next(check for check in self.fault.expected.split() if check != "restart")

    @property
    def task(self):
        return f"The file does one thing wrong. What you would notice: {self.text}"

    def source(self):
        return self.fault.source()

    def own_hints(self):
        right = functions((ROOT / self.script).read_text())
        names = sorted({name for name, _ in functions(self.source()) ^ right})
        return [f"Look at {' and '.join(names) or 'the last lines'}."]


class Fill(FileExercise):
    """A script with gaps: a unit of its diff, or what changes in a function."""

    @property
    def base(self):
        return next(step.base for step in ALL if step.file == self.script)

    @property
    def task(self):
        return f"Where it says FILL IN, lines are missing, or still those of {self.base}."

    def pieces(self, cut):
        """Returns the pieces of the diff that are missing."""
        for node in cut.statements:
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                return cut.inside[node]
        units = [self.unit(cut, number) for number in range(len(cut.pieces))]
        named = [unit for n, unit in enumerate(units) if self.name in str(cut.lines({n}))]
        return {n for n, unit in enumerate(units) if unit in named}

    def unit(self, cut, piece):
        """Returns the unit of a piece; while a new line has no answer, it is one of its own."""
        lines = digests(cut.lines({piece}))
        known = (u for u in load()[self.script] if {*lines} <= {*split(u["lines"])})
        return next(known, {"lines": "".join(lines), "without": ""})

    def source(self):
        """Returns the script, with what its page says of each gap."""
        cut = Cut(self.base, self.script)
        pieces = self.pieces(cut)
        text = cut.put_back(pieces)
        lines = text.text.splitlines()
        first = {text.starts[n]: n for n in sorted(pieces, reverse=True)}  # of those in one place
        for start, piece in sorted(first.items(), reverse=True):
            indent = re.match(" *", cut.lines({piece})[-1][1:])[0]
            without = self.unit(cut, piece)["without"]
            gap = f"{indent}{GAP}. " + (f"Without it, {without}" if without else "")
            lines[start - 1 : start - 1] = textwrap.wrap(gap, 98, subsequent_indent=f"{indent}# ")
        return "\n".join(lines) + "\n"


class Whole(Fill):
    """The script that it builds on, to be made into it."""

    @property
    def task(self):
        return f"The file is {self.base}. Make {self.script} of it, as its page asks."

    def source(self):
        return (ROOT / self.base).read_text()

    def own_hints(self):
        """Returns the hints of its page, without links."""
        page = (ROOT / "docs" / f"{self.stage}.md").read_text()
        hints = re.findall(r"<summary>Hint.*</summary>\n\n((?:.+\n)+)", page)
        return [re.sub(r"\[([^]]+)\]\([^)\s]*\)", r"\1", " ".join(hint.split())) for hint in hints]


KINDS = {kind.__name__.lower(): kind for kind in (Predict, Repair, Fill, Whole)}


def read_exercises():
    """Returns the exercises of exercises.txt, where a line that names a script begins its own."""
    exercises = []
    for line in Path(__file__).with_name("exercises.txt").read_text().splitlines():
        if line in STAGES:
            stage, number = line, 0
        elif line and not line.startswith("#"):
            number += 1
            kind, _, rest = line.partition(" ")
            exercises.append(KINDS[kind](stage, number, *rest.split(" | ")))
    return exercises
