"""What falls when a unit of a diff is put back: the first check of the judge, or the first test."""

import ast
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.judge.checks import Judge, WrongError, toy_task
from tools.judge.stages import STAGES
from tools.steps import ROOT
from tools.units.cut import UNDEFINED
from tools.units.stored import digests

TIME_LIMIT_S = 3600  # of the tests of a file
DOCSTRING = "docstring"  # what falls without the lines at the top of a file
TESTS = ROOT / "tests"
STAGE_TESTS = "one_rank bad_input own_changes training preemptible hangs"
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
        judge = Judge(STAGES[name], path, toy_task, Path(folder))
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


def full_name(name):
    """Returns a test with its folder; its file's name is one of a kind, and all that is stored."""
    file, *case = name.split("::")
    path = next(TESTS.glob(f"*/{file}"), None)
    if not path:
        raise ValueError(f"there is no test {name}")
    return "::".join([str(path.relative_to(ROOT)), *case])


def test(file, text, *hints):
    """Returns the first test that fails where `text` is the file, and its error.

    It is one of the tests that `hints` name; without any, one of those whose name has the file's.
    """
    folder_of_file = file.rpartition("/")[0]
    names = [full_name(f"test_{name}.py") for name in STAGE_TESTS.split()]
    chosen = ["-k", Path(file).stem, *([f"tests/{folder_of_file}"] if folder_of_file else names)]
    if hints:
        chosen = map(full_name, hints)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "site", "runs", "*.pyc"))
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-W", "ignore"]
        command += ["-m", "" if hints else "not long and not nightly"]
        # For the line of a test that fails; and who has hung for so long, hangs.
        variables = os.environ | {"COLUMNS": "300", "TIMEOUT_S": "45"}
        run = subprocess.run(
            [*command, f"--basetemp={folder}/tmp", *chosen],
            **{"cwd": copy, "env": variables, "timeout": TIME_LIMIT_S},
            capture_output=True,
            text=True,
        )
    if hints and run.returncode in NOT_RUN:
        raise RuntimeError(f"{' '.join(hints)} did not run: {run.stdout}{run.stderr}")
    found = re.search(r"^(FAILED|ERROR) tests/\w+/(.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if not found:
        return None
    return found[2] if found[1] == "FAILED" else [*hints, found[2]][0], run.stdout


def fall(cut, file, unit, hint):
    """Returns the pieces that went, and the check or test that falls without them, if one does."""
    own, pieces = unit
    if all(isinstance(cut.docstrings.get(piece), ast.Module) for piece in own):
        return pieces, DOCSTRING
    while True:
        text = cut.put_back(pieces)
        if "::" in hint and test(file, text.text, hint):
            return pieces, hint
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(file).name
            path.write_text(text.text)
            name, says = judge(file, path) or test(file, text.text) or ("", "")
        lines = re.findall(rf'File "(?:{path}|\S+/copy/{file})", line (\d+)', says)
        errors = OF_THE_CUT.findall(says)
        more = lines and errors and cut.tied(text, errors[-1], int(lines[-1]), pieces)
        if not more:
            return pieces, name
        (pieces,) = cut.closures([pieces | more])


@functools.cache
def source(name):
    """Returns the source of a check or a test."""
    if name in ("", DOCSTRING):
        return ""
    if not name.startswith("test_"):
        return inspect.getsource(getattr(Judge, f"check_{name}"))
    file, _, case = name.partition("::")  # without :: is a file that cannot even be collected
    tests = ast.parse((ROOT / full_name(file)).read_text()).body
    named = [part for part in tests if getattr(part, "name", "") == case.partition("[")[0]]
    if case and not named:
        raise ValueError(f"there is no test {name}")
    return "".join(map(ast.unparse, named))


def digest(lines, name):
    """Returns what changes with a unit, and with the check or the test that it falls to."""
    return digests([f"{lines}\n{source(name)}"])[0]


def answer(cut, file, unit, hint=""):
    """Returns what falls without a unit of a file, as units.json holds it.

    `with` it go the pieces without which the script would stop at an undefined name.
    """
    own, together = unit
    pieces, name = fall(cut, file, unit, hint)
    (needed,) = cut.closures([own], UNDEFINED)
    shown = ((pieces - together) | needed) - own
    every, named = cut.lines(range(len(cut.pieces))), cut.lines(shown)
    named = [line for line in named if named.count(line) == every.count(line)]  # and no other's
    lines, others = ("".join(digests(texts)) for texts in (cut.lines(own), named))
    found = {"lines": lines, "with": others, "falls": name, "of": digest(lines, name)}
    return {key: value for key, value in found.items() if others or key != "with"}
