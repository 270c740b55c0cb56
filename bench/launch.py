"""Starts commands that are measured, and that end with this process."""

import contextlib
import sys
import tempfile
from pathlib import Path

from tools.launch.jobs import Job
from tools.steps import ROOT

TIME_LIMIT_S = 1800  # of a command, on a machine that is not busy


def output_of(command):
    """Returns what a command prints; ends this process if it fails, or does not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(command, ROOT, {}, Path(folder, "log"))
        try:
            with contextlib.suppress(AssertionError):  # it still runs, and is ended
                job.wait(TIME_LIMIT_S)
            if job.status() != 0:
                sys.exit(f"{job.output}\nfailed: {command}")
            return job.output
        finally:
            job.end()
