"""What every_kill.py puts into each rank: it names the points of a run, and kills at one of them.

A point comes before each operation that a file, another rank or a reader of the log can tell from
none: so it comes after the operation before, too.
"""

import builtins
import collections
import io
import json
import os
import pickle
import signal
import sys
import threading

import torch
import torch.distributed as dist
import tqdm
from torch.optim.optimizer import register_optimizer_step_pre_hook

COLLECTIVES = """init_process_group new_group destroy_process_group barrier all_reduce broadcast
    all_gather_object gather_object scatter_object_list broadcast_object_list
    all_gather_into_tensor reduce_scatter_tensor""".split()
open_file = io.open


class Points:
    """Counts the points of this rank by name; `kills` are those at which it acts."""

    def __init__(self):
        self.root = os.path.dirname(os.environ["KILL_FOLDER"])
        self.control = os.environ["KILL_FOLDER"]
        self.rank = int(os.environ["RANK"])
        self.kills = json.loads(os.environ["KILLS"])
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.again = False  # send the signal at the next point as well
        self.journal = os.open(f"{self.control}/points", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open_file(f"{self.control}/{self.rank}.pid", "w") as file:
            file.write(str(os.getpid()))

    def reach(self, name, *details):
        with self.lock:
            self.counts[name] += 1
            point = [self.rank, name, self.counts[name]]
        # One write, so that the ranks' records do not mix.
        os.write(self.journal, pickle.dumps((*point, details)))
        if self.again:
            self.again = False
            self.signal_all(signal.SIGTERM)
        for number, (mode, *where) in enumerate(self.kills):
            if where == point and self.first_time(number):
                self.act(mode)

    def first_time(self, number):
        """Returns whether no life before has been here, since each kill is to happen once."""
        try:
            os.close(os.open(f"{self.control}/fired{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def act(self, mode):
        if mode == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        self.again = mode == "sigterm_twice"
        self.signal_all(signal.SIGKILL if mode == "all" else signal.SIGTERM)

    def signal_all(self, signum):
        """Signals all ranks that have started, as torchrun does when it gets a signal."""
        pids = [open_file(f.path).read() for f in os.scandir(self.control) if f.name[-4:] == ".pid"]
        for pid in sorted(map(int, filter(None, pids)), key=os.getpid().__eq__):  # itself last
            os.kill(pid, signum)

    def path(self, path, folder=-1):
        """Returns a path from `root` on, or "" for one elsewhere, such as of a library's cache."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
        path = os.path.join(base, os.fsdecode(path))
        return path[len(self.root) + 1 :] if path.startswith(f"{self.root}/node") else ""

    def watch_names(self, event, args):
        """Is an audit hook: Python calls it before each of these operations, in any library."""
        if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            paths = [self.path(args[0])]
        elif event == "os.rename":
            paths = [self.path(args[0], args[2]), self.path(args[1], args[3])]
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            paths = [self.path(args[0], args[-1])]
        else:
            return
        if all(paths):
            self.reach(f"{event.removeprefix('os.')} {paths[0]}", *paths)


def install(script):
    """Makes each operation of this process a point."""
    tqdm.tqdm.set_lock(threading.RLock())  # a killed rank would leave a semaphore behind
    points = Points()
    sys.addaudithook(points.watch_names)

    class File(io.FileIO):  # without a buffer: each write reaches the disk before the next point
        def write(self, data):
            points.reach(f"write {points.path(self.name)}")
            return super().write(data)

    def open_traced(file, mode="r", *args, **options):
        if mode == "wb" and "KILL_BUFFERS" not in os.environ and points.path(file):
            return File(file, mode)
        return open_file(file, mode, *args, **options)

    builtins.open = io.open = open_traced

    def before(owner, name, label=None):
        original = getattr(owner, name)

        def call(*args, **options):
            points.reach(label or name)
            return original(*args, **options)

        setattr(owner, name, call)

    fsync = os.fsync

    def fsync_traced(file):
        with open_file(f"/proc/self/fd/{file}", "rb") as copy:
            points.reach(f"fsync {points.path(file)}", points.path(file), copy.read())
        fsync(file)

    os.fsync = fsync_traced
    for name in COLLECTIVES:
        before(dist, name)
    before(torch.Tensor, "backward")
    register_optimizer_step_pre_hook(lambda *_: points.reach("step"))
    write = tqdm.tqdm.write

    def write_traced(text, **options):
        points.reach("log", text)
        write(text, **options)

    tqdm.tqdm.write = write_traced
    run_batch = script.Trainer._run_batch

    def run_batch_traced(trainer, inputs, targets):
        points.reach("batch", getattr(trainer, "epochs_run", 0), getattr(trainer, "samples_run", 0))
        run_batch(trainer, inputs, targets)

    script.Trainer._run_batch = run_batch_traced
    if "KILL_LINES" in os.environ:
        trace_lines(points, script)


def trace_lines(points, script):
    """Makes each line a point, of the script and of whatever it calls to save or to load."""

    def trace(frame, event, arg):
        name = frame.f_code.co_filename
        saving = frame
        if name != script.__file__:
            while saving and saving.f_code.co_name not in ("_save_snapshot", "_load_snapshot"):
                saving = saving.f_back
        if not saving or name == __file__:
            return None
        if event == "line":
            points.reach(f"line {os.path.basename(name)}:{frame.f_lineno}")
        return trace

    sys.settrace(trace)
