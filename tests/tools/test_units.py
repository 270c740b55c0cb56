"""tools/units: each changed line is in one unit, and has an answer to what falls without it."""

import sys
import warnings

import pytest
from helpers import read_script

from tools.steps import ALL, ROOT, diff_lines
from tools.units import __main__ as units
from tools.units import answers
from tools.units.cut import Cut
from tools.units.stored import digests, load, owners, split


@pytest.mark.parametrize("step", [step for step in ALL if step.file.endswith(".py")])
def test_each_changed_line_has_an_answer(step):
    """An answer that lacks its sentence, or its test, fails; an edited line waits for the night."""
    hint = f"run: python -m tools.units {step.file}; then write what falls `without` it"
    known = load().get(step.file, [])
    for unit in known:
        assert unit.get("without") and (unit["falls"] or unit.get("surplus")), (hint, unit)
        answers.digest(unit["lines"], unit["falls"])  # or else it is neither a check nor a test
    lines = diff_lines(step.base, step.file)
    new = [line for line, owner in zip(lines, owners(lines, known), strict=True) if owner is None]
    if new:
        warnings.warn("\n".join([hint, *new]), stacklevel=1)


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


def answer_without(file, text, *hints):
    """Returns the answer for the unit whose changed lines contain a text."""
    cut, found = units.cut_anew(file, load()[file])
    (unit,) = (unit for unit, _ in found if text in str(cut.lines(unit[0])))
    return answers.answer(cut, file, unit, *hints)


@pytest.mark.long
def test_what_falls(monkeypatch):
    """Without DDP, the line that unwraps its model goes, too; then the ranks' weights differ."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = answer_without("multigpu.py", "DistributedDataParallel")
    (line,) = (line for line in diff_lines("singlegpu.py", "multigpu.py") if ".module.st" in line)
    assert digests([line])[0] in split(found["with"])
    assert found["falls"] == "weights"


@pytest.mark.long
def test_a_test_that_a_person_names():
    name = "test_bad_input.py::test_more_processes_than_gpus"
    assert answer_without("multigpu_torchrun.py", "too few GPUs", name)["falls"] == name


def test_an_edited_line_is_asked_again(tmp_path, monkeypatch):
    """A unit that only moved keeps its answer; one of which a line has changed is cut anew."""
    old = ["import os", "", "print(os)", "a = 1"]
    new = ["import os", "", "b = 2", "print(os)", "a = 3"]
    for name, lines in (("old.py", old), ("new.py", ["", *new])):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    monkeypatch.setitem(units.BASES, "new.py", tmp_path / "old.py")
    monkeypatch.setattr("tools.units.cut.ROOT", tmp_path)
    moved, edited = "".join(digests(["+b = 2"])), "".join(digests(["-a = 1", "+a = 2"]))
    known = [{"lines": lines, "falls": "docstring"} for lines in (moved, edited)]
    known[0]["of"] = answers.digest(moved, "docstring")
    cut, found = units.cut_anew("new.py", known)
    asked = [
        cut.lines(own) for (own, _), stored in found if not (stored and units.is_fresh(stored))
    ]
    assert [stored for _, stored in found if stored] == known[:1]
    assert asked == [["-a = 1", "+a = 3"]]


def test_where(capsys, monkeypatch):
    """The line of an earlier step is found in a later one; what cannot be is said in a line."""
    text = (ROOT / "multinode.py").read_text().splitlines()
    number = next(n for n, line in enumerate(text, 1) if "DistributedDataParallel(" in line)
    monkeypatch.setattr(sys, "argv", ["units", "--where", f"multinode.py:{number}"])
    units.main()
    place, holder, sentence = capsys.readouterr().out.splitlines()
    assert place.startswith("multigpu.py:")
    assert place.endswith(text[number - 1])
    assert holder == "make check, weights"
    assert "nothing averages the gradients" in sentence


@pytest.mark.parametrize(
    "place, message",
    [
        ("nowhere.py:1", "no FILE:LINE of a file that builds on another"),
        ("multigpu.py", "no FILE:LINE"),
        ("multigpu.py:9999", "multigpu.py has no line 9999"),
        ("multigpu.py:0", "multigpu.py has no line 0"),
        ("multigpu.py:4", "stands in singlegpu.py already"),
    ],
)
def test_where_is_nothing(place, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["units", "--where", place])
    with pytest.raises(SystemExit, match=message):
        units.main()


def test_a_test_that_is_not_there():
    text = (ROOT / "multigpu.py").read_text()
    with pytest.raises(RuntimeError, match=r"::test_nothing did not run"):
        answers.test("multigpu.py", text, "test_units.py::test_nothing")
