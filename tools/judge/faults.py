"""Faulty versions of the stages: python -m tools.judge.faults 3 > broken.py writes the third.

Each is a file of the series with a small edit, such as beginners make: faults.diff has them all,
each below its name, its stage, and the checks that must fail on it. The first ten are what
docs/faults.md asks about. All of them prove the checks: see tests/tools/test_check.py. A new one
is worth its half minute if a check fails on it in a line where it fails on no other.
"""

import sys
from pathlib import Path
from typing import NamedTuple

from tools.steps import ROOT


class Fault(NamedTuple):
    what: str
    stage: str
    fails: str  # the checks that must fail on it, and no others
    edits: tuple[str, ...]  # old text, new text, and so on

    def source(self):
        """Returns the faulty script."""
        text = (ROOT / f"{self.stage}.py").read_text()
        for old, new in zip(self.edits[::2], self.edits[1::2], strict=True):
            if text.count(old) != 1:
                first = old.strip().partition("\n")[0]
                raise ValueError(f"{self.what}: not once in {self.stage}.py: {first}")
            text = text.replace(old, new)
        return text


def parse(text):
    """Returns the fault of a diff below its title, whose hunks are separated by @@."""
    title, _, diff = text.strip().partition("\n")
    edits = []
    for hunk in diff.split("\n@@\n"):
        for signs in (" -", " +"):
            lines = [line[1:] for line in hunk.splitlines() if line[0] in signs]
            edits.append("".join(f"{line}\n" for line in lines))
    return Fault(*title.removeprefix("# ").split(" | "), tuple(edits))


def read_faults(path):
    return [parse(text) for text in path.read_text().split("\n\n")]


PATH = Path(__file__).with_name("faults.diff")
FAULTS = read_faults(PATH)


if __name__ == "__main__":
    numbers = [str(number) for number in range(1, 11)]
    if sys.argv[1:2] not in [[number] for number in numbers]:
        sys.exit("name one of the scripts 1 to 10: python -m tools.judge.faults 3 > broken.py")
    print(FAULTS[int(sys.argv[1]) - 1].source(), end="")
