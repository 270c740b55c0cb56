"""The exercises of `make learn`, as exercises.txt lists them.

They are made of what is there: the faults that prove the judge, the units of each diff, the hints
of the pages, the explanations of the checks. What needs torch is imported where it is used.
"""

import ast
import re
import subprocess
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rankcheck.launch.jobs import environment, free_port

from tools.edits import read
from tools.judge.stages import STAGES
from tools.steps import ALL, ROOT
from tools.units.cut import Cut
from tools.units.stored import digests, load, split

TASKS = {
    "predict": "{0.text}",
    "repair": "The file does one thing wrong. What you would notice: {0.text}",
    "fill": "Where it says FILL IN, lines are missing, or still those of {0.base}.",
    "whole": "The file is {0.base}. Make {0.script} of it, as its page asks.",
}


@dataclass
class Exercise:
    """A script to be edited until the judge has nothing against it, or a run to be predicted."""

    stage: str
    number: int  # of those of its stage
    kind: str
    name: str
    text: str  # the check that it is about, what one would notice, or a question
    about: str = ""  # this and what follows: of a prediction
    choices: str = ""  # separated by commas, or "a number"
    why: str = ""
    pattern: str = ""  # whose last match in what the command prints is the answer
    command: str = ""

    def __post_init__(self):
        self.key = f"{self.stage} {self.kind} {self.name}"
        self.script = f"{self.stage}.py"
        self.base = next((step.base for step in ALL if step.file == self.script), "")
        self.task = TASKS[self.kind].format(self)
        self.check = self.text
        if self.kind == "repair":
            faults = {(fault.stage, fault.what): fault for fault in read("faults")}
            self.fault = faults[self.stage, self.name]
            # The first that fails and that needs no launcher, which takes long.
            self.check = next(check for check in self.fault.expected.split() if check != "restart")

    def source(self):
        if self.kind == "repair":
            return self.fault.source()
        if self.kind == "whole":
            return (ROOT / self.base).read_text()
        return with_gaps(self.base, self.script, self.name)

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
        if self.kind == "predict":
            return [f"It is about {self.about}."]
        from tools.judge.checks import explanation

        # That of "starts" is about everything that may stop a script.
        hints = [] if self.check == "starts" else [": ".join(explanation(self.check))]
        if self.kind == "repair":
            right = functions((ROOT / self.script).read_text())
            names = sorted({name for name, _ in functions(self.source()) ^ right})
            hints.append(f"Look at {' and '.join(names) or 'the last lines'}.")
        if self.kind == "whole":
            page = ROOT / "docs" / f"{self.stage}.md"  # one of several scripts has no hints
            text = page.read_text() if page.exists() else ""
            of_page = re.findall(r"<summary>Hint.*</summary>\n\n((?:.+\n)+)", text)
            without_links = [re.sub(r"\[([^]]+)\]\([^)\s]*\)", r"\1", hint) for hint in of_page]
            hints += [" ".join(hint.split()) for hint in without_links]
        return [*hints, f"The answer: diff -U0 {self.path(folder)} {self.script}"]

    def answer(self):
        """Runs the command beside the scripts; returns what it prints, and the answer in it."""
        with tempfile.TemporaryDirectory() as folder:
            for path in (*ROOT.glob("*.py"), ROOT / "by_hand", ROOT / "recipes", ROOT / "tools"):
                Path(folder, path.name).symlink_to(path)
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
            streams["stderr"] = subprocess.STDOUT
            options = {
                "shell": True,
                "cwd": folder,
                "env": environment() | {"PORT": str(free_port())},
            }
            output = subprocess.run(self.command, **streams, **options).stdout
        *_, found = ["not known, since the run failed", *re.findall(self.pattern, output, re.M)]
        return output, found


def functions(source):
    """Returns the name and the code of each function."""
    nodes = ast.walk(ast.parse(source))
    return {(node.name, ast.unparse(node)) for node in nodes if isinstance(node, ast.FunctionDef)}


def with_gaps(base, script, name):
    """Returns a script without what is new in a function, or in a unit, and what that does."""
    cut = Cut(base, script)
    units = []  # of each piece
    for number in range(len(cut.pieces)):
        lines = digests(cut.lines({number}))
        known = (unit for unit in load()[script] if {*lines} <= {*split(unit["lines"])})
        # While a new line has no answer, it is a unit of its own.
        units.append(next(known, {"lines": "".join(lines), "without": ""}))
    named = [unit for number, unit in enumerate(units) if name in str(cut.lines({number}))]
    pieces = {number for number, unit in enumerate(units) if unit in named}
    for node in cut.statements:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            pieces = cut.inside[node]
    text = cut.put_back(pieces)
    lines = text.text.splitlines()
    first = {text.starts[n]: n for n in sorted(pieces, reverse=True)}  # of those in one place
    for start, piece in sorted(first.items(), reverse=True):
        indent = re.match(" *", cut.lines({piece})[-1][1:])[0]
        without = units[piece]["without"]
        gap = f"{indent}# FILL IN. " + (f"Without it, {without}" if without else "")
        lines[start - 1 : start - 1] = textwrap.wrap(gap, 98, subsequent_indent=f"{indent}# ")
    return "\n".join(lines) + "\n"


def read_exercises():
    """Returns the exercises of exercises.txt, where a line that names a script begins its own."""
    exercises = []
    for line in Path(__file__).with_name("exercises.txt").read_text().splitlines():
        if line in STAGES:
            stage, number = line, 0
        elif line and not line.startswith("#"):
            number += 1
            kind, _, rest = line.partition(" ")
            exercises.append(Exercise(stage, number, kind, *rest.split(" | ", 6)))
    return exercises
