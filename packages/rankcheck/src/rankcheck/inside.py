"""Notes what a process of an audit does, and ends it: after so many steps, or by a signal."""

import atexit
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback

import numpy
import torch
import torch._dynamo  # before a function of torch's is replaced
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from rankcheck import replay, witness
from rankcheck.folder import Guard
from rankcheck.pretend_gpus import frameworks, on_cpu
from rankcheck.witness import details as witness_details
from rankcheck.witness import files as witness_files
from rankcheck.witness import order as witness_order
from rankcheck.witness import state

start = None  # when the first step ended
failed = []  # the error of this process
given_port = None  # by torchrun


def seed():
    """Gives each process other random numbers, as one has that is not forked, or AUDIT_SEED's."""
    number = int(os.environ.get("AUDIT_SEED") or random.SystemRandom().getrandbits(32))
    for function in (torch.manual_seed, random.seed, numpy.random.seed):
        function(number)


def after_step():
    global start
    if start is None:
        start = time.monotonic()
        (witness.folder() / "begun").write_text("1")
    sent = witness.folder() / "sent"
    at, signum = map(int, os.environ["AUDIT_SIGNAL"].split())
    if state.steps == at and not sent.exists():
        sent.touch()
        signal_all(signum)
    seconds = time.monotonic() - start
    if state.steps >= int(os.environ["AUDIT_STEPS"]) or seconds > int(os.environ["AUDIT_SECONDS"]):
        (witness.folder() / "limited").touch()
        signal_all(signal.SIGKILL)


def kill_in_save(event):
    """Kills all at the file event AUDIT_EVENT; a file that is written is empty then."""
    sent = witness.folder() / "sent"
    if f"{state.steps} {event}" == os.environ["AUDIT_EVENT"] and not sent.exists():
        sent.touch()
        kind, path = event.split(" ", 1)
        if kind == "write":
            witness.original["open"](path, "wb").close()
        signal_all(signal.SIGKILL)


def signal_all(signum):
    """Sends a signal to all processes that train, to this one last, with their data workers.

    As from torchrun, it comes from a process that is not a data worker's parent.
    """
    witness.write(signal=signum)
    pids = {int(path.stem) for path in witness.folder().glob("*.jsonl")} - {os.getpid()}
    # A process that the script has started leads no group of its own.
    kill = f"kill -s {signum} --"
    kills = [f"{kill} -{pid} || {kill} {pid}" for pid in [*pids, os.getpid()]]
    options = {"stderr": subprocess.DEVNULL, "start_new_session": True}
    subprocess.run(["sh", "-c", "; ".join(kills)], **options)


def fail(optimizer, args, options):
    """Lets each step end with an error."""
    witness.write(raised=True, place=witness.place())
    raise RuntimeError("an error of rankcheck's, to see the exit status")


def noted(function):
    """Returns a function whose error, or whose end, is written down."""

    def call(*args, **options):
        try:
            result = function(*args, **options)
        except SystemExit as error:
            if error.code and not failed:  # else torch exits so, after an error
                witness.write(error=f"it exits: {error}", time=time.time())
            raise
        except Exception as error:
            note_error(error)
            raise
        note_end()
        return result

    return call


def note_error(error):
    failed.append(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [[frame.filename, frame.lineno, frame.name] for frame in frames]
    text = f"{type(error).__name__}: {error}"
    witness.write(error=text, frames=lines, time=time.time())
    if "AUDIT_FIRST_ERROR" in os.environ:  # other nodes would wait for this one
        signal_all(signal.SIGKILL)


def note_end():
    witness.write(finished=True, losses=state.losses)


def note_end_of_command():
    """Notes how this process ends if the script has started it as a command."""

    def note_uncaught(kind, error, traceback):
        if isinstance(error, Exception):
            note_error(error)
        sys.__excepthook__(kind, error, traceback)

    sys.excepthook = note_uncaught
    atexit.register(lambda: failed or note_end())


def join(backend=None, init_method=None, *args, **options):
    in_url = re.search(r"tcp://.*:(\d+)", str(init_method))
    port = in_url[1] if in_url else os.environ.get("MASTER_PORT")
    if port != given_port:
        witness.write(port=port, place=witness.place())
    if os.environ["AUDIT_PORT"]:  # other audits run the same script at the same time
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["AUDIT_PORT"]}
        if str(init_method).startswith("tcp://"):
            init_method = f"tcp://127.0.0.1:{os.environ['AUDIT_PORT']}"
    witness.write(backend=backend or "cpu:gloo,cuda:nccl")  # which torch makes of none
    init_process_group("gloo", init_method, *args, **options)


def describe_gpus(pretended):
    on_gpus = bool(pretended.used) or pretended.has_library()
    return {"current_gpu": pretended.current(), "on_gpus": on_gpus}


def guard_writes():
    """Lets the script write into its own folder alone: see folder.py."""
    guard = Guard(os.getcwd(), witness.folder() / "lock", float(os.environ["AUDIT_START"]))
    guard.install()
    save = torch.save

    def guarded_save(obj, f, *args, **options):
        if isinstance(f, str | os.PathLike):  # which torch opens in C++
            guard.before_write(f)
        return save(obj, f, *args, **options)

    torch.save = guarded_save


def install():
    global init_process_group, given_port
    given_port = os.environ.get("MASTER_PORT")
    seed()
    guard_writes()
    frameworks.install()
    if os.environ["PRETEND_GPUS"] != "0":
        on_cpu.install()
        on_cpu.on_first_use.append(lambda number: witness.write(gpu=number))
        state.is_on_gpu = on_cpu.is_on_gpu
        state.details.append(lambda *step: describe_gpus(on_cpu).items())
    witness.install()
    witness_details.install()
    witness_files.install()
    witness_order.install()
    replay.install()
    state.after_step.append(after_step)
    if "AUDIT_EVENT" in os.environ:
        state.on_file_event.append(kill_in_save)
    if "AUDIT_RAISE" in os.environ:
        register_optimizer_step_post_hook(fail)
    init_process_group, dist.init_process_group = dist.init_process_group, join
    dist.device_mesh.init_process_group = join  # which makes a group, if there is none
    if os.environ["AUDIT_PORT"]:
        os.register_at_fork(after_in_child=seed)
