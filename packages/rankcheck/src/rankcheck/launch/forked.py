"""What runs in the ranks that launch.jobs.Ranks forks."""

import atexit
import importlib
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import threading

import numpy
import torch
from torch.distributed import TCPStore

MAX_FILE_BYTES = 3000  # a limit on the size of files stands in for a full disk


def start_store(listener):
    """Returns the store that listens at this socket."""
    port = listener.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
    options["master_listen_fd"] = listener.detach()
    try:
        return TCPStore("127.0.0.1", port, **options)
    except NotImplementedError:  # by libuv's, in torch 2.6
        return TCPStore("127.0.0.1", port, use_libuv=False, **options)


def run(script, arguments, variables, folder, log, disk_is_full, listener):
    """Runs a script in this process as `python script arguments` would in `folder`.

    Rank 0 gets `listener`, the socket of its store, which init_process_group then finds.
    """
    os.setsid()  # as torchrun does: a signal to its process group reaches its data workers, too
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    for stream in (sys.stdout, sys.stderr):  # whole lines, since all ranks write into one file
        stream.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    numpy.random.seed()  # else all that one process has forked draw the same numbers
    if "PRETEND_GPUS" in variables and variables.get("CUDA_VISIBLE_DEVICES") != "":
        importlib.import_module("rankcheck.pretend_gpus.tensor")
    if disk_is_full:
        hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, hard_limit))
    if listener:
        store = start_store(listener)  # noqa: F841
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        threading._shutdown()  # as Python does first: waits for threads
        # Python would end data workers by SIGTERM, and wait without a limit for one that is still
        # starting: it has the rank's handler.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a DataLoader's would raise
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()
        atexit._run_exitfuncs()  # multiprocessing would leave them out
        sys.stdout.flush()
