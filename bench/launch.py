"""Starts what is measured: commands, which end with this process, and their ranks."""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

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


@contextlib.contextmanager
def process_group(parser):
    """Makes this process a rank; returns its device."""
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    yield device
    time.sleep(0.1)  # as in multinode.py
    dist.destroy_process_group()
