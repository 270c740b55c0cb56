"""Each edit in tools/edits/ is noticed as it says; that it fits its files, make docs asks."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import IGNORED, LONG, NIGHTLY, first, run

from tools import edits
from tools.judge.checks import judge, make_judge, toy_task
from tools.judge.run import WrongError
from tools.judge.stages import STAGES
from tools.steps import ROOT
from tools.units.answers import full_name

TIME_LIMIT_S = 600


def cases(name, day, marks=NIGHTLY):
    """Returns the edits of a list, of which all but the first ones have marks."""
    return pytest.mark.parametrize(
        "edit", first(day, edits.read(name), marks), ids=lambda edit: edit.what
    )


def judge_of(folder, edit):
    file = folder / "own.py"
    file.write_text(edit.source())
    return make_judge(STAGES[edit.stage], file, toy_task, folder)


@pytest.mark.long
@cases("faults", 2)  # the page's
def test_a_fault_fails_its_checks_alone(tmp_path, edit):
    file = tmp_path / "faulty.py"
    file.write_text(edit.source())
    assert judge(edit.stage, file, toy_task, tmp_path) == edit.expected.split()


@pytest.mark.long
@cases("messages", 4)
def test_a_check_names_the_fault(tmp_path, monkeypatch, edit):
    monkeypatch.setattr("rankcheck.launch.jobs.time_of_import", lambda: 0)  # on a quiet machine
    check, says = edit.expected.split(": ", 1)
    judge = judge_of(tmp_path, edit)
    with pytest.raises(WrongError, match=says):
        judge.check_starts()
        getattr(judge, f"check_{check}")()


@pytest.mark.long
@cases("accepted", 5)
def test_a_check_accepts(tmp_path, edit):
    judge = judge_of(tmp_path, edit)
    for check in edit.expected.split():
        getattr(judge, f"check_{check}")()


@cases("upgrades", 3, LONG)
def test_compose_says(tmp_path, edit):
    """What is no conflict of lines, but one of names or places, is told in a line each."""
    part, _, problem = edit.expected.partition(": ")
    own, out = tmp_path / "own.py", tmp_path / "out.py"
    own.write_text(edit.source())
    result = run(sys.executable, "-m", "tools.compose", own, part, "--base", edit.where, "-o", out)
    if problem:
        assert result.returncode == 1
        assert problem.format(own=own) in result.stderr
        assert all(line.startswith(f"{out}") for line in result.stderr.splitlines())
    else:
        assert (result.returncode, result.stderr) == (0, "")


@cases("noticed", 0)
def test_tests_fail(tmp_path, edit):
    """In a copy, in all its files at once."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    names = []
    for path in edit.files(copy):
        path.write_text(edit.apply(path))
        names.append(full_name(f"test_{edit.expected}".format(path.relative_to(copy))))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:warnings"]
    env = os.environ | {"TIMEOUT_S": "45"}  # who has hung for so long, hangs
    result = subprocess.run(
        [*command, f"--basetemp={tmp_path}/tmp", *dict.fromkeys(names)],
        **{"cwd": copy, "env": env, "timeout": TIME_LIMIT_S},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"= {len({*names})} failed in " in result.stdout, result.stdout
