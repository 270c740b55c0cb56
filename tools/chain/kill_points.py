"""What every_kill.py puts into each rank: it counts the points of a run, and kills at one of them.

A point lies before an operation that the disk, another rank or a reader of the log can tell from
none, and so after the operation before.
"""

import builtins
import collections
import functools
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

COLLECTIVES = """init_process_group new_group destroy_process_group barrier all_reduce broadcast
    all_gather_object gather_object scatter_object_list broadcast_object_list
    all_gather_into_tensor reduce_scatter_tensor"""
CONTROL = os.environ.get("KILL_FOLDER", "")
DISKS = os.path.join(os.path.dirname(CONTROL), "node")
open_untraced = io.open


class Points:
    """The points of this rank, by name and number; `kills` are those at which it acts."""

    def __init__(self):
        self.rank = int(os.environ["RANK"])
        self.kills = json.loads(os.environ["KILLS"])
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.signal_again = False
        self.log = os.open(f"{CONTROL}/points", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        Path(CONTROL, f"{os.getpid()}.pid").touch()

    def reach(self, name, *details):
        with self.lock:
            self.counts[name] += 1
            point = [self.rank, name, self.counts[name]]
        os.write(self.log, pickle.dumps((*point, details)))  # one write: ranks share the file
        if self.signal_again:
            self.signal_again = False
            self.signal_all(signal.SIGTERM)
        for mode, *where in self.kills:
            if where == point:
                self.act(mode, f"{CONTROL}/{self.rank}.fired")

    def act(self, mode, mark):
        if os.path.exists(mark):  # in a life before
            return
        Path(mark).touch()
        if mode == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        self.signal_again = mode == "sigterm_twice"
        self.signal_all(signal.SIGKILL if mode == "all" else signal.SIGTERM)

    def signal_all(self, signum):
        """Signals all ranks that have started, this one last."""
        pids = [int(path.stem) for path in Path(CONTROL).glob("*.pid")]
        for pid in sorted(pids, key=os.getpid().__eq__):
            os.kill(pid, signum)

    def audit(self, event, args):
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
            self.reach(f"{event.removeprefix('os.')} {paths[0]}", *paths)


def on_disk(path, folder=-1):
    """Returns a path on a node's disk, such as node0/snapshot.pt, or "" for one elsewhere."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
    path = os.path.join(base, os.fsdecode(path))
    return os.path.relpath(path, os.path.dirname(DISKS)) if path.startswith(DISKS) else ""


def before(owner, name, action):
    """Has `owner.name` call `action` first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args, **options):
        action(*args, **options)
        return original(*args, **options)

    setattr(owner, name, call)


def install(script):
    """Makes each operation of this process a point."""
    tqdm.set_lock(threading.RLock())  # by default, a semaphore, which a kill would leave behind
    points = Points()
    sys.addaudithook(points.audit)

    class File(io.FileIO):  # without a buffer: each write reaches the disk before the next point
        def write(self, data):
            points.reach(f"write {on_disk(self.name)}")
            return super().write(data)

    def open_traced(file, mode="r", *args, **options):
        if mode == "wb" and "KEEP_BUFFERS" not in os.environ and on_disk(file):
            return File(file, mode)
        return open_untraced(file, mode, *args, **options)

    def reach_fsync(descriptor):
        path = on_disk(descriptor)
        points.reach(f"fsync {path}", path, Path(f"/proc/self/fd/{descriptor}").read_bytes())

    builtins.open = io.open = open_traced
    before(os, "fsync", reach_fsync)
    for name in COLLECTIVES.split():
        before(dist, name, lambda *args, name=name, **options: points.reach(name))
    before(torch.Tensor, "backward", lambda *args, **options: points.reach("backward"))
    register_optimizer_step_pre_hook(lambda *args: points.reach("step"))
    before(tqdm, "write", lambda text, **options: points.reach("log", text))
    run_batch = script.Trainer._run_batch

    def run_batch_traced(trainer, inputs, targets):
        points.reach("batch", trainer.epochs_run, trainer.samples_run)
        run_batch(trainer, inputs, targets)

    script.Trainer._run_batch = run_batch_traced
    if "KILL_LINES" in os.environ:
        sys.settrace(functools.partial(trace_lines, points, script.__file__))


def trace_lines(points, script, frame, event, arg):
    """Makes each line of the script a point, and each line of what it calls to save or to load."""
    name, caller = frame.f_code.co_filename, frame
    while name != script and caller and not caller.f_code.co_name.endswith("_snapshot"):
        caller = caller.f_back
    if caller is None or name == __file__:
        return None
    if event == "line":
        points.reach(f"line {os.path.basename(name)}:{frame.f_lineno}")
    return functools.partial(trace_lines, points, script)
