"""What every_kill.py puts into each rank: it counts the points of a run, and kills at one of them.

A point lies before an operation that the disk, another rank or a reader of the log can tell from
none, and so after the operation before.
"""

import builtins
import collections
import contextlib
import io
import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from tqdm import tqdm

from tools.launch.patched import before

COLLECTIVES = """init_process_group new_group destroy_process_group barrier all_reduce broadcast
    all_gather_object gather_object scatter_object_list broadcast_object_list
    all_gather_into_tensor reduce_scatter_tensor"""
CONTROL = Path(os.environ["KILL_FOLDER"])
DISKS = f"{CONTROL.parent}/node"
RANK = int(os.environ["RANK"])
KILLS = json.loads(os.environ["KILLS"])
POINTS = os.open(CONTROL / "points", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
lock = threading.Lock()
counts = collections.Counter()  # how often a name was reached
signal_again = False
open_untraced = io.open


def reach(name, *more):
    global signal_again
    with lock:
        counts[name] += 1
        point = [RANK, name, counts[name]]
    os.write(POINTS, pickle.dumps((*point, more)))  # one write, since the ranks share the file
    if signal_again:
        signal_again = False
        signal_all(signal.SIGTERM)
    mark = CONTROL / f"{RANK}.fired"
    for mode, *where in KILLS:
        if where == point and not mark.exists():  # in no life before
            mark.touch()
            if mode == "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            signal_again = mode == "sigterm_twice"
            signal_all(signal.SIGKILL if mode == "all" else signal.SIGTERM)


def signal_all(signum):
    """Signals all ranks that have started, this one last."""
    pids = [int(path.stem) for path in CONTROL.glob("*.pid")]
    for pid in sorted(pids, key=os.getpid().__eq__):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signum)


def on_disk(path, folder=-1):
    """Returns a path on a node's disk, such as node0/snapshot.pt, or "" for one elsewhere."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
    path = os.path.join(base, os.fsdecode(path))
    return os.path.relpath(path, CONTROL.parent) if path.startswith(DISKS) else ""


def audit(event, args):
    """Is called by Python before operations on files, whichever library asks for them."""
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
        paths = [on_disk(args[0])]
    elif event in ("os.mkdir", "os.remove", "os.rmdir"):
        paths = [on_disk(args[0], args[-1])]
    elif event == "os.rename":
        paths = [on_disk(args[0], args[2]), on_disk(args[1], args[3])]
    else:
        return
    if all(paths):
        reach(f"{event.removeprefix('os.')} {paths[0]}", *paths)


class File(io.FileIO):
    """Has no buffer: each write reaches the disk before the next point."""

    def write(self, data):
        reach(f"write {on_disk(self.name)}")
        return super().write(data)


def open_traced(file, mode="r", *args, **options):
    if mode == "wb" and "KEEP_BUFFERS" not in os.environ and on_disk(file):
        return File(file, mode)
    return open_untraced(file, mode, *args, **options)


def reach_fsync(descriptor):
    path = on_disk(descriptor)
    reach(f"fsync {path}", path, Path(f"/proc/self/fd/{descriptor}").read_bytes())


def make_small(script):
    """Gives the toy few samples, and dropout, so that a random state that is lost is seen."""
    dataset, model = script.ToyDataset, script.ToyModel
    script.ToyDataset = lambda size: dataset(24 if size == 2048 else size)

    class Dropout(model):
        def forward(self, inputs):
            return super().forward(torch.nn.functional.dropout(inputs, 0.1))

    script.ToyModel = Dropout


class EachStep:
    """Stands for `Trainer.next_check`: the ranks ask after each step whether to stop."""

    def __get__(self, trainer, owner):
        return trainer.steps

    def __set__(self, trainer, step):
        pass


def install(script):
    """Makes each operation of this process a point."""
    if hasattr(script, "ToyDataset"):
        make_small(script)
    script.Trainer.next_check = EachStep()
    tqdm.set_lock(threading.RLock())  # by default, a semaphore, which a kill would leave behind
    (CONTROL / f"{os.getpid()}.pid").touch()
    sys.addaudithook(audit)
    builtins.open = io.open = open_traced
    before(os, "fsync")(reach_fsync)
    for name in COLLECTIVES.split():
        before(dist, name)(lambda *args, name=name, **options: reach(name))
    before(torch.Tensor, "backward")(lambda *args, **options: reach("backward"))
    register_optimizer_step_pre_hook(lambda *args: reach("step"))
    before(tqdm, "write")(lambda text, **options: reach("log", text))

    @before(script.Trainer, "_run_batch")
    def reach_batch(self, inputs, targets):
        reach("batch", self.epochs_run, getattr(self, "samples_run", 0))
