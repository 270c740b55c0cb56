"""Runs WITNESS_SCRIPT, or the module WITNESS_MODULE, in a forked rank, under WITNESS_OBSERVER.

That is a file whose `install` notes and changes what one tool needs; where it has a function
`noted`, what runs the script is that function of it. Without WITNESS_TORCHRUN, the script is
started as by python, and the ranks that it starts itself are forked, since torch is there.
"""

import multiprocessing
import os
import runpy
import sys
from multiprocessing import process

import torch.multiprocessing

from rankcheck import witness

OF_TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
forking = multiprocessing.get_context("fork")


def fork_ranks(noted):
    spawn = sys.modules["torch.multiprocessing.spawn"]
    start_processes = spawn.start_processes

    def fork_processes(fn, *args, start_method="fork", **options):
        return start_processes(noted(fn), *args[:4], start_method="fork", **options)

    spawn.start_processes = torch.multiprocessing.start_processes = fork_processes
    for module in (multiprocessing, torch.multiprocessing):
        module.get_context = lambda method=None: forking
    process.BaseProcess.run = noted(process.BaseProcess.run)
    os.register_at_fork(after_in_child=witness.watch_lines)


def start(script, observer):
    name = os.environ.get("WITNESS_MODULE")
    sys.path[0] = os.environ["WITNESS_ROOT"] if name else os.path.dirname(script)
    multiprocessing.set_start_method("fork", force=True)  # as where torchrun starts it
    for module in (multiprocessing, torch.multiprocessing):  # for the script to choose, once
        module.set_start_method = lambda method, force=False: None
    by_torchrun = "WITNESS_TORCHRUN" in os.environ
    for variable in [] if by_torchrun else OF_TORCHRUN.split():
        os.environ.pop(variable, None)
    observer = witness.load_observer(observer)
    observer.install()
    noted = getattr(observer, "noted", lambda function: function)
    if not by_torchrun:
        fork_ranks(noted)
    if name:  # as python -m does
        noted(runpy.run_module)(name, run_name="__main__", alter_sys=True)
    else:
        noted(runpy.run_path)(script, run_name="__main__")


start(os.environ["WITNESS_SCRIPT"], os.environ["WITNESS_OBSERVER"])
