"""Starts training scripts and waits for them: as a command, or as ranks that are forked."""

import contextlib
import multiprocessing
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path

from rankcheck.launch import forked

STARTUP = Path(__file__).parents[1] / "startup"  # on PYTHONPATH: see its sitecustomize.py
TIMEOUT_S = float(os.environ.get("TIMEOUT_S", 180))  # of a wait, on a machine that is not busy
QUIET_IMPORT_S = 3  # in which torch is imported on such a machine, or faster


def time_of_import():
    """Returns how many seconds the import of torch takes now: many where the machine is busy."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=3600)
    return time.monotonic() - start


class TimeLimit:
    """A number of seconds, and n times as many on a machine that is n times as slow as usual."""

    def __init__(self, seconds=None):
        self.seconds = seconds or TIMEOUT_S
        self.limit = self.seconds
        self.import_s = 0.0
        self.start = time.monotonic()
        self.size = 0

    def seconds_passed(self):
        return time.monotonic() - self.start

    def passed(self, files=()):
        """Returns whether the time is over; near the limit, looks how busy the machine is.

        It begins anew whenever one of `files` has grown.
        """
        size = sum(path.stat().st_size for path in files)
        if size != self.size:
            self.start, self.size = time.monotonic(), size
        if self.seconds_passed() < self.limit:
            return False
        self.import_s = time_of_import()
        limit = self.seconds * max(1, self.import_s / QUIET_IMPORT_S)
        if limit <= self.limit:
            return True
        self.limit = limit
        return False


def free_port():
    """Returns a port that nobody listens at, of those that the system gives to no connection."""
    while True:
        port = random.randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port


def environments():
    """Returns the environment of each process that this user may read, as text, by process id."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            found[int(environ.parent.name)] = environ.read_bytes().decode(errors="replace")
    return found


def new_log(folder):
    folder.mkdir(exist_ok=True)
    return folder / f"{len(list(folder.glob('*.log')))}.log"


def environment():
    """Returns the variables of this process, without what would start a rank, and with Python."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "MASTER_"))}
    path = f"{Path(sys.executable).parent}:{ours['PATH']}"
    return ours | {"PATH": path, "OMP_NUM_THREADS": "1"}


def send_signal(pid, signum):
    """Sends a rank a signal as torchrun does: to the process group that it leads, if it does."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signum)


def kill(pid):
    """Kills a process and all that it has started: without /proc, which macOS lacks."""
    pgrep = ["pgrep", "-P", str(pid)]
    children = subprocess.run(pgrep, capture_output=True, timeout=TIMEOUT_S).stdout.split()
    # First the parent: a torchrun that outlives its rank would begin a rendezvous, and die in it.
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill(int(child))


class Job:
    """A started command; `output` is what it has printed so far, on stdout and stderr."""

    def __init__(self, command, folder, variables, log=None):
        self.log = log or new_log(folder)
        self.marker = f"TEST_JOB={uuid.uuid4()}"
        variables = variables | dict([self.marker.split("=")])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                shell=True,
                cwd=folder,
                env=environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self):
        return self.log.read_text()

    def status(self):
        """Returns the exit status, or None while it runs."""
        return self.process.poll()

    def wait_for(self, text, times=1):
        limit = TimeLimit()
        while True:
            ended = self.status() is not None  # before its last words are read
            if self.output.count(text) >= times:
                break
            assert not ended, f"ended without {text!r}:\n{self.output}"
            assert not limit.passed(), f"no {text!r} in {limit.limit:.0f} s:\n{self.output}"
            time.sleep(0.01)

    def wait(self, seconds=None):
        limit = TimeLimit(seconds)
        while self.status() is None:
            assert not limit.passed(), f"still running after {limit.limit:.0f} s:\n{self.output}"
            time.sleep(0.01)
        return self.status()

    def processes(self):
        """Returns the environment of each process of this job, orphans included, by process id."""
        found = {}
        for pid, environment in environments().items():
            variables = environment.split("\0")
            if self.marker in variables:
                found[pid] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def end(self):
        while pids := self.processes():  # again: one may have just started another
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        if self.status() is None:
            kill(self.process.pid)
        self.process.wait(TIMEOUT_S)


def torchrun_variables(rank, folders):
    """Returns what torchrun tells a rank; each has the folder of its node."""
    local_rank = folders[:rank].count(folders[rank])
    world = {
        "RANK": rank,
        "WORLD_SIZE": len(folders),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": folders.count(folders[rank]),
        "GROUP_WORLD_SIZE": len(set(folders)),
        "GROUP_RANK": len(set(folders[:rank])) - (local_rank > 0),
    }
    return {name: str(value) for name, value in world.items()}


class Server(forkserver.ForkServer):
    """A process that forks ranks, with a seed of its own for the hashes that order sets."""

    def __init__(self, hash_seed):
        super().__init__()
        self.hash_seed = hash_seed
        self.set_forkserver_preload(
            ["torch", "torch._dynamo", "torch.distributed.checkpoint", "tqdm"]
        )

    def ensure_running(self):
        os.putenv("PYTHONHASHSEED", self.hash_seed)  # not for what is started otherwise
        super().ensure_running()
        os.unsetenv("PYTHONHASHSEED")

    def start(self, process):
        forkserver.connect_to_new_process = self.connect_to_new_process
        process.start()


SERVERS = (Server("1"), Server("2"))  # each starts when it is first needed


class Ranks(Job):
    """A process for each of `folders`, with what torchrun would tell it; all print into one log.

    Most of the time of a short training is the import of torch. Here a process that has done it
    forks the ranks, for tests in which it does not matter how the ranks are started. torch._dynamo
    is what the first optimizer of a process imports.

    The `servers` take turns.
    """

    process = multiprocessing.get_context("forkserver").Process

    def __init__(self, command, folders, variables, full_disk_folders, servers=SERVERS[:1]):
        script, *arguments = shlex.split(command)
        self.folders = folders
        self.log = new_log(folders[0])
        self.log.touch()
        # Rank 0 gets the socket itself: a free port might be taken before it listens there.
        listener = socket.create_server(("127.0.0.1", 0))
        address, port = listener.getsockname()
        master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        self.ranks = []
        self.terminated = set()  # each is told once
        for server in servers:  # they load torch at the same time
            server.ensure_running()
        for rank, folder in enumerate(folders):
            folder.mkdir(exist_ok=True)
            world = torchrun_variables(rank, folders)
            if Path(script).name == "singlegpu.py":
                world = {}  # it is started with python
            env = environment() | master | world | variables
            more = (folder in full_disk_folders, listener if rank == 0 else None)
            args = (script, arguments, env, folder, self.log, *more)
            self.ranks.append(self.process(target=forked.run, args=args))
            servers[rank % len(servers)].start(self.ranks[-1])
        listener.close()

    def status(self):
        ended = [rank.exitcode for rank in self.ranks]
        # As a launcher does, ends the other ranks of a machine after a failure.
        failed = {folder for folder, code in zip(self.folders, ended, strict=True) if code}
        for rank, folder in zip(self.ranks, self.folders, strict=True):
            if folder in failed and rank.exitcode is None and rank not in self.terminated:
                self.terminated.add(rank)
                send_signal(rank.pid, signal.SIGTERM)
        # A rank that failed by itself says why, and not one that was ended because of it.
        own = [rank.exitcode for rank in self.ranks if rank not in self.terminated]
        return None if None in ended else max(own, key=abs)

    def signal(self, signum):
        """Sends every rank a signal, as torchrun does when it gets one."""
        for rank in self.ranks:
            send_signal(rank.pid, signum)

    def end(self):
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
            rank.kill()
            rank.join(TIMEOUT_S)
        self.ranks = []


class Shell:
    """Starts jobs in a folder of theirs, and ends what is left of them.

    With `as_in_life`, sets have another order on every other rank, and after a restart.
    """

    job, ranks_job = Job, Ranks

    def __init__(self, folder, as_in_life=False):
        self.folder = folder
        self.as_in_life = as_in_life
        self.jobs = []

    def start(self, command, **variables):
        self.jobs.append(self.job(command, self.folder, variables))
        return self.jobs[-1]

    def ranks(self, command, world_size=1, **variables):
        """Starts the ranks of a script on one node, without torchrun."""
        return self.ranks_on([self.folder] * world_size, command, **variables)

    def ranks_on(self, folders, command, full_disk_folders=(), **variables):
        """Starts a rank in each of the folders, one per node; the disks of some may be full."""
        servers = SERVERS if self.as_in_life else SERVERS[:1]
        turn = len(self.jobs) % len(servers)
        servers = servers[turn:] + servers[:turn]
        self.jobs.append(self.ranks_job(command, folders, variables, full_disk_folders, servers))
        return self.jobs[-1]

    def end_all(self):
        for job in self.jobs:
            job.end()


def pretend_gpus(count):
    """Returns the variables that let a process and its children believe in so many GPUs."""
    visible = ",".join(map(str, range(count)))
    variables = {"PRETEND_GPUS": str(count), "CUDA_VISIBLE_DEVICES": visible}
    return variables | {"PYTHONPATH": str(STARTUP)}
