"""Writes the events of a process into a file of its own in WATCH_FOLDER: parent-process.jsonl.

Each is a line of JSON: the number of the script's line, the name of the collective or None, the
values that have changed, the ranks of the collective's group if they are not all, the operation of
torch.distributed, and whether it belongs to the same call as the one before.
"""

import json
import os
import threading
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

from rankcheck.witness import local

MAX_STEPS, MAX_EVENTS = 20, 2000
file = None
count = 0
steps = 0
lines = {}  # of the script, that run now, by thread
thread = threading.main_thread().ident  # whose lines are written, later that of the training
changed = {}  # since the last event
known = {}


def follow_this_thread():
    global thread
    thread = threading.get_ident()


def write(collective=None, ranks=None, operation=None, goes_on=False):
    global file, count
    line = lines.get(thread)
    if not line or get_worker_info() is not None:  # the script has not begun, or is not trained
        return
    if file is None:
        path = f"{os.environ['WATCH_FOLDER']}/{os.getppid()}-{os.getpid()}.jsonl"
        file = open(path, "a")  # noqa: SIM115
    if steps < MAX_STEPS and count < MAX_EVENTS:
        file.write(json.dumps([line, collective, changed, ranks, operation, goes_on]) + "\n")
        file.flush()  # so that it is there if this process hangs or is killed
        count += 1
    elif count:
        Path(file.name).with_suffix(".full").touch()
    changed.clear()


def note(name, value):
    if isinstance(value, torch.Tensor):
        value = local(value).detach().flatten()[:1]  # the first element of this rank's part
        value = value.item() if value.untyped_storage().size() else "none"
    if isinstance(value, float):
        value = f"{value:.6g}"
    if known.get(name) != str(value):
        known[name] = changed[name] = str(value)
