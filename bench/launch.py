"""Runs the commands that are measured, in the top folder, and ends what is left of them."""

import contextlib
import sys
import tempfile
from pathlib import Path

from torch.distributed import TCPStore

from tools.launch.jobs import Job, free_port
from tools.steps import ROOT

TIME_LIMIT_S = 1800  # of a command, on a machine that is not busy


@contextlib.contextmanager
def started(command):
    with tempfile.TemporaryDirectory() as folder:
        job = Job(command, ROOT, {}, Path(folder, "log"))
        try:
            yield job
        finally:
            job.end()


def run(command, time_limit_s=TIME_LIMIT_S):
    """Returns a command's exit status, None at the end of its time, and what it has printed."""
    with started(command) as job:
        with contextlib.suppress(AssertionError):  # it still runs, and is ended
            job.wait(time_limit_s)
        return job.status(), job.output


def output_of(command):
    """Returns what a command prints; ends this process if it fails."""
    status, output = run(command)
    if status != 0:
        sys.exit(f"{output}\nfailed: {command}")
    return output


@contextlib.contextmanager
def coordinator():
    """Starts recipes/coordinator.py; returns its port, once it listens."""
    port = free_port()
    with started(f"python recipes/coordinator.py localhost:{port}"):
        TCPStore("localhost", port + 1)
        yield port
