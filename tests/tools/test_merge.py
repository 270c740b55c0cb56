"""tools/compose/merge.py keeps a reader's lines where they are, or marks a conflict."""

import ast
import re

import pytest

from tools.compose.compose import BASES
from tools.compose.merge import merge
from tools.steps import ROOT


@pytest.mark.parametrize(
    "old, ours, theirs",
    [  # at the end of a block that the other dissolves; an import that the other has replaced
        ("if a:|    b()|c()", "if a:|    b()|    own()|c()", "b()|c()"),
        ("from m import a", "from m import a, own", "from n import b"),
    ],
)
def test_conflict(old, ours, theirs):
    """What nobody can place is no part of a script."""
    sides = ([(line, None) for line in side.split("|")] for side in (old, ours, theirs))
    assert ("<<<<<<<", None) in merge(*sides, lambda *_: [("<<<<<<<", None)])


def indent(line):
    return len(line) - len(line.lstrip())


def step_lines(file):
    """Returns the lines of the methods that train a batch and an epoch."""
    method = r"^    def _run_(?:batch|epoch)\(.*?(?=\n\n)"
    found = re.findall(method, (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(found).splitlines()


@pytest.mark.long
def test_own_lines():
    """Between any two lines of a step, one's own conflict, or stay between the same ones."""
    conflicts, count = set(), 0
    for part, base in BASES.items():
        old, new = step_lines(base), step_lines(part)
        for n in range(1, len(old)):
            depth = indent(old[n])
            if depth == 4:  # that of the methods
                continue
            own = [" " * depth + "if own:", " " * depth + "    own()"]
            sides = (old, [*old[:n], *own, *old[n:]], new)
            sides = ([(line, None) for line in side] for side in sides)
            merged = [line for line, _ in merge(*sides, lambda *_: [("<<<<<<<", None)])]
            count += 1
            if "<<<<<<<" in merged:
                conflicts.add((part, old[n - 1].strip()))
                continue
            start = merged.index(own[0])
            assert merged == [*new[:start], *own, *new[start:]]
            assert merged[start - 1] == old[n - 1] or merged[start + 2] == old[n]
            assert indent(merged[start + 2]) <= depth  # it takes in no other line
            ast.parse("\n".join(["class Trainer:", *merged]))
    print(f"{count} insertions:", *sorted(conflicts), sep="\n")
    assert ("recipes/mixed_precision.py", "loss.backward()") in conflicts
    assert len(conflicts) < count / 100  # or all would do
