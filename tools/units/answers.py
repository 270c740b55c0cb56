"""What falls when a unit of a diff is put back: the first check of the judge, or the first test."""

import ast
import functools
import hashlib
import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.judge.checks import Judge, WrongError, toy_task
from tools.judge.stages import STAGES
from tools.steps import ALL, ROOT
from tools.units.cut import Cut

TIME_LIMIT_S = 3600  # of the tests of a file
DOCSTRING = "docstring"  # what falls without the lines at the top of a file
TESTS = ROOT / "tests"
STAGE_TESTS = "one_rank bad_input own_changes training preemptible hangs"
# An error that tells of the cut, and not of the step's idea: a line that is left needs another.
OF_THE_CUT = r"^(E|\[rank\d+\]:|\W)*(NameError|AttributeError|UnboundLocalError|TypeError)\b"
NOT_RUN = (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED)
OUTPUT = "It has printed:"
ERROR = re.compile(r"\w+(?:Error|Exception)\b(?!:? \[Errno 98\]).*")


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
    (path,) = TESTS.glob(f"*/{file}")
    return "::".join([str(path.relative_to(ROOT)), *case])


def test(file, text, *hints):
    """Returns the first test that fails where `text` is the file, and its error.

    It is one of the tests that `hints` name; without any, one of those whose name has the file's.
    """
    names = [full_name(f"test_{name}.py") for name in STAGE_TESTS.split()]
    if folder_of_file := file.rpartition("/")[0]:
        names = [f"tests/{folder_of_file}"]
    chosen = ["-k", Path(file).stem, *names]
    if hints:
        chosen = map(full_name, hints)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "site", "runs", "*.pyc"))
        (copy / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-W", "ignore"]
        marked = "" if hints else "not long and not nightly"
        command += ["-m", marked, f"--basetemp={folder}/tmp", *chosen]
        # For the line of a test that fails; and who has hung for so long, hangs.
        variables = os.environ | {"COLUMNS": "300", "TIMEOUT_S": "45"}
        run = subprocess.run(
            command, cwd=copy, env=variables, capture_output=True, text=True, timeout=TIME_LIMIT_S
        )
    if hints and run.returncode in NOT_RUN:
        raise RuntimeError(f"{' '.join(hints)} did not run: {run.stdout}{run.stderr}")
    found = re.search(r"^(FAILED|ERROR) tests/\w+/(.+?)(?: - (.*))?$", run.stdout, re.MULTILINE)
    output, _, _ = run.stdout.partition("short test summary")
    if not found:
        return None
    name = found[2] if found[1] == "FAILED" else [*hints, found[2]][0]  # an ERROR names the file
    return name, f"{found[3] or ''} {OUTPUT} {output}"


def fall(cut, file, unit, hint):
    """Returns the pieces that went, and the check or test that falls without them, if one does."""
    own, pieces = unit
    if all(isinstance(cut.is_text(piece), ast.Module) for piece in own):
        return pieces, (DOCSTRING, "")
    while True:
        text = cut.put_back(pieces)
        if "::" in hint and (failed := test(file, text.text, hint)):
            return pieces, failed
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(file).name
            path.write_text(text.text)
            fallen = judge(file, path) or test(file, text.text)
        says = fallen[1] if fallen else ""
        lines = re.findall(rf'File "(?:{path}|\S+/copy/{file})", line (\d+)', says)
        more = set()
        if lines and re.search(OF_THE_CUT, says, re.MULTILINE):
            more = cut.at(text, int(lines[-1])) - pieces
        if not more:
            return pieces, fallen
        pieces = cut.closure(pieces | more)


def digest(lines, name):
    """Returns what changes with a unit, and with the check or the test that it falls to."""
    source = ""
    if name.startswith("test_"):  # a name without :: is a file that cannot even be collected
        file, _, case = name.partition("::")
        tests = ast.parse((ROOT / full_name(file)).read_text()).body
        named = [part for part in tests if getattr(part, "name", "") == case.partition("[")[0]]
        if case and not named:
            raise ValueError(f"there is no test {name}")
        source = "".join(map(ast.unparse, named))
    elif name and name != DOCSTRING:
        source = inspect.getsource(getattr(Judge, f"check_{name}"))
    return hashlib.sha256("\n".join([*lines, source]).encode()).hexdigest()[:12]


def summary(says):
    """Returns the first sentence of what a check says, and the last error that the run printed.

    Without what is so on this machine alone: its name, and the folders of a test.
    """
    first, _, output = says.partition(OUTPUT)
    errors = [text.strip(" |") for text in ERROR.findall(output) if "Process" not in text]
    short = " ".join([*first.split(), *errors[-1:]])
    host = re.escape(socket.gethostname())
    short = re.sub(rf"rank \d+ of \d+ starts on {host} \(.*?\)| o[fn] {host}\b", "", short)
    return " ".join(re.sub(r"[^\s'(]*/tmp/\S*/", "", short).split())[:300]


@functools.cache  # it takes a minute of a long file
def cut_of(file):
    step = next(step for step in ALL if step.file == file)
    return Cut(step.base, file)


def stored(units, file):
    """Returns each unit of a file as it is cut today, what is stored of it, and whether it is new.

    New is also one whose check or test has changed.
    """
    cut = cut_of(file)
    known = {tuple(unit["lines"]): [] for unit in units}
    for unit in units:
        known[tuple(unit["lines"])].append(unit)
    found = []
    for unit in cut.units:
        same = known.get(tuple(cut.lines(unit[0])))
        answered = same.pop(0) if same else {}
        now = digest(cut.lines(unit[1]), answered.get("falls", ""))
        found.append((unit, answered, answered.get("of") != now))
    return found


def answer(file, unit, hint=""):
    """Returns what falls without a unit of a file, as units.json holds it."""
    cut = cut_of(file)
    own, alone = unit
    pieces, fallen = fall(cut, file, unit, hint)
    name, says = fallen or ("", "")
    return {
        "lines": cut.lines(own),
        "with": cut.lines(pieces - own),
        "falls": name,
        "says": summary(says),
        "of": digest(cut.lines(alone), name),
    }
