"""tools/units: each changed line is in one unit, and has an answer to what falls without it."""

import json
from collections import Counter

import pytest
from helpers import read_script

from tools.steps import ALL, ROOT, diff_lines
from tools.units import answers
from tools.units.answers import answer, cut_of
from tools.units.cut import UNITS, Cut

ANSWERED = json.loads(UNITS.read_text())


@pytest.mark.parametrize("step", [step for step in ALL if step.file.endswith(".py")])
def test_each_changed_line_has_an_answer(step):
    units = ANSWERED.get(step.file, [])
    lines = Counter(line for unit in units for line in unit["lines"])
    hint = f"run: python -m tools.units {step.file}; then write what falls `without` it"
    assert lines == Counter(diff_lines(step.base, step.file)), hint
    for unit in units:
        assert unit["without"] and (unit["falls"] or unit["surplus"]), (hint, unit["lines"])
        answers.digest([], unit["falls"])  # or else it is neither a check nor a test


def test_units(tmp_path):
    """What has no use without a line, or no sense, goes with it; a docstring with its function."""
    (tmp_path / "old.py").write_text(read_script("print_file.py"))
    (tmp_path / "new.py").write_text(read_script("print_start.py"))
    cut = Cut(tmp_path / "old.py", tmp_path / "new.py")
    units = [(cut.lines(own), len(pieces - own)) for own, pieces in cut.units]
    whole = [
        "-def main(path):",
        "+def main(path, size):",
        '+    """Prints the start of a file."""',
        "-    print(data)",
        "+    print(data[:size])",
        '-main("a")',
        '+main("a", 3)',
    ]
    unless = ["+    if not data:", "+        # Nothing to print.", "+        sys.exit()"]
    read = ["-    return open(path).read()", "+    total = open(path).read()", "+    return total"]
    assert units == [(["+import sys", *unless], 0), (whole, 0), (read, 0)]


def unit_with(file, text):
    """Returns the unit of a file whose changed lines contain a text."""
    cut = cut_of(file)
    (unit,) = (unit for unit in cut.units if text in str(cut.lines(unit[0])))
    return unit


@pytest.mark.long
def test_what_falls(monkeypatch):
    """Without DDP, the line that unwraps its model goes, too; then the ranks' weights differ."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = answer("multigpu.py", unit_with("multigpu.py", "DistributedDataParallel"))
    assert any("self.model.module" in line for line in found["with"])
    assert (found["falls"], found["says"][:15]) == ("weights", "After 1 steps, ")


@pytest.mark.long
def test_a_test_that_a_person_names():
    name = "test_bad_input.py::test_more_processes_than_gpus"
    unit = unit_with("multigpu_torchrun.py", "too few GPUs")
    assert answer("multigpu_torchrun.py", unit, name)["falls"] == name


def test_a_test_that_is_not_there():
    text = (ROOT / "multigpu.py").read_text()
    with pytest.raises(RuntimeError, match=r"::test_nothing did not run"):
        answers.test("multigpu.py", text, "test_units.py::test_nothing")
