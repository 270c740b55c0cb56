"""Starts commands that are measured, and that end with this process."""

import contextlib
import sys
import tempfile
from pathlib import Path

from tools.launch.jobs import Job
from tools.steps import ROOT

TIME_LIMIT_S = 1800  # of a command, on a machine that is not busy


def run(command, time_limit_s=TIME_LIMIT_S):
    """Returns a command's exit status, None at the end of its time, and what it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(command, ROOT, {}, Path(folder, "log"))
        try:
            with contextlib.suppress(AssertionError):  # it still runs, and is ended
                job.wait(time_limit_s)
            return job.status(), job.output
        finally:
            job.end()


def output_of(command):
    """Returns what a command prints; ends this process if it fails."""
    status, output = run(command)
    if status != 0:
        sys.exit(f"{output}\nfailed: {command}")
    return output
