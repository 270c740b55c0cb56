"""What the tests of rankcheck share."""

import subprocess
import sys

import pytest

from rankcheck.auditor import Audit
from rankcheck.cli import parse_args


def by_day(number, values):
    """Returns parameters, tuples if there are several, of which all but the first are nightly."""
    rest = [value if type(value) is tuple else (value,) for value in values[number:]]
    return [*values[:number], *(pytest.param(*value, marks=pytest.mark.nightly) for value in rest)]


def run_rankcheck(*arguments, folder=None):
    """Runs the command in a folder; returns its status and what it has printed."""
    command = [sys.executable, "-m", "rankcheck", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)


def audit(folder, *arguments):
    audit = Audit(parse_args([*map(str, arguments)]), folder)
    try:
        return audit.ask()
    finally:
        audit.shell.end_all()
