"""tools.audit finds the faults of tests/audit/faults.txt, and none in right scripts."""

import re

import pytest
from helpers import NIGHTLY, run

from tools.steps import ROOT

_, *EDITS = (ROOT / "tests" / "audit" / "faults.txt").read_text().splitlines()


def audit(path, *arguments):
    """Returns the status, and what is said, without the line breaks within a sentence."""
    result = run("python", "-m", "tools.audit", str(path), *arguments)
    assert not result.stderr
    return result.returncode, re.sub(r"\n {10}", " ", result.stdout)


def short(number, values):
    """Leaves all but the first values to the night."""
    return [*values[:number], *(pytest.param(value, marks=NIGHTLY) for value in values[number:])]


@pytest.mark.parametrize("edit", short(1, EDITS))
def test_fault(tmp_path, edit):
    script, old, new, line, sentence = edit.split(" | ")
    source = (ROOT / "tests" / "audit" / f"{script}.py").read_text()
    assert source.count(old) == 1
    source = source.replace(old, new)
    (tmp_path / "faulty.py").write_text(source)
    (number,) = (n for n, text in enumerate(source.splitlines(), 1) if line in text)
    said = audit(tmp_path / "faulty.py")[1]
    assert re.search(
        rf"^(WRONG|look at) +faulty.py:{number}: .*{re.escape(sentence)}", said, re.M
    ), said


RIGHT = [f"tests/audit/{name}.py" for name in ("two_optimizers", "functions", "spawned")]


@pytest.mark.parametrize("path", short(1, RIGHT))
def test_right_script(path):
    status, said = audit(ROOT / path)
    assert status == 0 and "WRONG" not in said, said


def test_misuse(tmp_path):
    (tmp_path / "breaks.py").write_text("import nosuch")
    result = run("python", "-m", "tools.audit", str(tmp_path / "breaks.py"))
    assert result.returncode == 2
    assert "could not be run" in result.stderr and "No module named 'nosuch'" in result.stderr
