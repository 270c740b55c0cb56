"""What falls when a unit of a diff is put back: the first check of the judge, or the first test."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.judge.checks import WrongError, make_judge, toy_task
from tools.judge.stages import STAGES
from tools.steps import ROOT
from tools.units.stored import DOCSTRING, NOTHING, digests, first_sentence

TIME_LIMIT_S = 3600  # of the tests of a file
TESTS = ROOT / "tests"
OF_A_STAGE = ["every_script", "stages", "pages/test_hangs.py"]  # tests of scripts in no folder
# An error that tells of the cut, and not of the step's idea: a line that is left needs another.
OF_THE_CUT = re.compile(
    r"^(?:E|\[rank\d+\]:|\W)*((?:NameError|AttributeError|UnboundLocalError|TypeError)\b.*)", re.M
)
NOT_RUN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)


def judge(file, path):
    """Returns the first check that fails on a script that stands for `file`, and what it says."""
    name = file.removesuffix(".py")
    if name not in STAGES:
        return None
    with tempfile.TemporaryDirectory() as folder:
        judge = make_judge(STAGES[name], path, toy_task, Path(folder))
        judge.forks = True
        try:
            for check in STAGES[name].checks.split():
                getattr(judge, f"check_{check}")()
        except WrongError as error:
            return check, str(error)
        except Exception as error:  # no run that the judge can read
            return check, f"{type(error).__name__}: {error}"
        finally:
            judge.shell.end_all()
    return None


@functools.cache
def full_name(name):
    """Returns a test with the path of its file, which need not be named if no other file has it."""
    file, _, function = name.partition("[")[0].rpartition("::")
    files = TESTS.glob(f"*/{file or 'test_*.py'}")
    found = [path for path in files if f"\ndef {function}(" in path.read_text()]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files have a test {name}")
    return f"{found[0].relative_to(ROOT)}::{name.removeprefix(f'{file}::')}"


def short_name(file, name):
    """Returns a test as units.json names it: with its case only if that names the script."""
    module, _, test = name.partition("::")
    function, _, case = test.partition("[")
    test = test if Path(file).name in case else function
    try:
        full_name(test)
    except ValueError:  # two files have it
        return f"{module}::{test}"
    return test


def test(file, text, hint=""):
    """Returns the first test that fails where `text` is the file, and its error.

    It is the test that `hint` names; without one, one of those whose name has the file's.
    """
    folder_of_file = file.rpartition("/")[0]
    chosen = [f"tests/{path}" for path in ([folder_of_file] if folder_of_file else OF_A_STAGE)]
    chosen = [full_name(hint)] if hint else ["-k", Path(file).stem, *chosen]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "site", "runs", "*.pyc"))
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-W", "ignore"]
        # The tests of a push come last: most lines need none of them.
        for marks in [""] if hint else ["not path and not long", "long and not nightly"]:
            run = subprocess.run(
                [*command, "-m", marks, f"--basetemp={folder}/tmp", *chosen],
                cwd=copy,
                # For the line of a test that fails; and a run that hangs for so long, hangs.
                env=os.environ | {"COLUMNS": "300", "TIMEOUT_S": "45"},
                timeout=TIME_LIMIT_S,
                capture_output=True,
                text=True,
            )
            if hint and run.returncode in NOT_RUN:
                raise RuntimeError(f"{hint} did not run: {run.stdout}{run.stderr}")
            pattern = r"^(?:FAILED|ERROR) tests/\w+/(.+?)(?: - .*)?$"
            if found := re.search(pattern, run.stdout, re.MULTILINE):
                return hint or short_name(file, found[1]), run.stdout
    return None


def fall(cut, file, unit, hint):
    """Returns the name of the check or test that falls without a unit."""
    own, pieces = unit
    if all(isinstance(cut.docstrings.get(piece), ast.Module) for piece in own):
        return DOCSTRING
    while True:
        text = cut.put_back(pieces)
        if hint.startswith("test_") and test(file, text.text, hint):
            return hint
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(file).name
            path.write_text(text.text)
            name, says = judge(file, path) or test(file, text.text) or (NOTHING, "")
        lines = re.findall(rf'File "(?:{path}|\S+/copy/{file})", line (\d+)', says)
        errors = OF_THE_CUT.findall(says)
        more = lines and errors and cut.tied(text, errors[-1], int(lines[-1]), pieces)
        if not more:
            return name
        (pieces,) = cut.closures([pieces | more])


def answer(cut, file, unit, hint=""):
    """Returns what falls without a unit of a file, in the form of units.json."""
    name = fall(cut, file, unit, hint)
    lines = cut.lines(unit[0])
    without = first_sentence(lines, name)
    return {"lines": "".join(digests(lines)), "falls": name, "without": without}
