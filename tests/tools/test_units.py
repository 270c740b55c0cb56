"""tools/units: each changed line is in one unit, and has an answer to what falls without it."""

import warnings

import pytest
from helpers import read_script

from tools.judge.stages import STAGES
from tools.steps import ALL, diff_lines
from tools.units import __main__ as units
from tools.units import answers
from tools.units.cut import Cut
from tools.units.stored import DOCSTRING, NOTHING, TODO, UNITS, digests, load, owners, write

NAMED = "test_more_processes_than_gpus"


def is_known(file, name):
    """Returns whether there is a test of this name, or else a check for this file."""
    if name.startswith("test_"):
        return bool(answers.full_name(name))
    stage = STAGES.get(file.removesuffix(".py"))
    return name in (DOCSTRING, NOTHING) or name in stage.checks.split()


@pytest.mark.parametrize("step", [step for step in ALL if step.file.endswith(".py")])
def test_each_changed_line_has_an_answer(step):
    """An answer that lacks its sentence, or its test, fails; an edited line waits for the night."""
    hint = f"run: python -m tools.units {step.file}; then write what falls `without` it"
    known = load().get(step.file, [])
    for unit in known:
        assert is_known(step.file, unit["falls"]) and TODO not in unit["without"], (hint, unit)
        assert len(unit["without"]) <= 100
    lines = diff_lines(step.base, step.file)
    new = [line for line, owner in zip(lines, owners(lines, known), strict=True) if owner is None]
    if new:
        warnings.warn("\n".join([hint, *new]), stacklevel=1)


def test_answers_are_stored_as_they_are_read(tmp_path):
    write(load(), tmp_path / "units.json")
    assert (tmp_path / "units.json").read_text() == UNITS.read_text()


def test_units(tmp_path):
    """What has no use without a line, or no sense, goes with it; a docstring with its function."""
    (tmp_path / "old.py").write_text(read_script("print_file.py"))
    (tmp_path / "new.py").write_text(read_script("print_start.py"))
    cut = Cut(tmp_path / "old.py", tmp_path / "new.py")
    found = cut.units(range(len(cut.pieces)))
    found = [(cut.lines(own), len(pieces - own)) for own, pieces in found]
    whole = [
        "-def main(path):",
        "+def main(path, size):",
        '+    """Prints the start of a file."""',
        "-    print(data)",
        "+    print(data[:size])",
    ]
    unless = ["+    if not data:", "+        # Nothing to print.", "+        sys.exit()"]
    read = ["-    return open(path).read()", "+    total = open(path).read()", "+    return total"]
    call = ['-main("a")', '+main("a", 3)']  # that it does not fit shows when it runs
    assert found == [(["+import sys", *unless], 0), (whole, 0), (read, 0), (call, 0)]


@pytest.mark.long
@pytest.mark.parametrize(
    "base, file, text, hint, falls",
    [
        # The line that unwraps DDP's model goes, too.
        ("singlegpu.py", "multigpu.py", "DistributedDataParallel", "", "weights"),
        ("multigpu.py", "multigpu_torchrun.py", "too few GPUs", NAMED, NAMED),
    ],
)
def test_what_falls(base, file, text, hint, falls):
    cut = Cut(base, file)
    (unit,) = (u for u in cut.units(range(len(cut.pieces))) if text in str(cut.lines(u[0])))
    assert answers.answer(cut, file, unit, hint)["falls"] == falls


def test_an_edited_line_is_asked_again(tmp_path, monkeypatch):
    """A unit that only moved keeps its answer; one of which a line has changed is cut anew."""
    (tmp_path / "old.py").write_text("import os\n\nprint(os)\na = 1\n")
    (tmp_path / "new.py").write_text("\nimport os\n\nb = 2\nprint(os)\na = 3\n")
    monkeypatch.setattr("tools.units.cut.ROOT", tmp_path)
    cut = Cut("old.py", "new.py")
    moved, edited = ["+b = 2"], ["-a = 1", "+a = 2"]
    stored = [{"lines": "".join(digests(lines))} for lines in (moved, edited)]
    known, rest = units.sort_pieces(cut, stored)
    assert [cut.lines(own) for own in known.values()] == [moved]
    assert cut.lines(rest) == ["-a = 1", "+a = 3"]
