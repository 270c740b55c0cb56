"""What the judge notes and changes in each process of a training, beside rankcheck's witness.

At its step PROBE_STEP, counted from 0, the rank PROBE_RANK sends itself the signal PROBE_SIGNAL,
once; if it is "last_node", the ranks with LAST_NODE set do, and to their launcher, too. By
Python's clocks, each step takes PROBE_STEP_S seconds longer.
"""

import importlib
import multiprocessing
import os
import signal
import time

import torch
import torch.distributed as dist
from rankcheck import witness
from rankcheck.witness import batches as witness_batches
from rankcheck.witness import folder, get_rank, local, state, write
from rankcheck.witness import order as witness_order
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import dataloader

gathered = 0  # the most parameters that were in this process's memory at once
original = {"manual_seed": torch.manual_seed}
running = 0  # sums of all ranks that this process has started and not waited for


def in_memory(parameter):
    """Returns how many of its numbers are in memory, which by_hand/fsdp.py takes and gives back."""
    tensor = local(parameter)
    return tensor.numel() if tensor.untyped_storage().nbytes() else 0


def note_gathered(module, inputs):
    global gathered
    if state.called is not None:
        gathered = max(gathered, sum(map(in_memory, state.roots[0].parameters())))


def note_progress(optimizer, parameters):
    parts = [(local(p).numel(), witness.sum_of([p])) for p in parameters]
    return {"gathered": gathered, "running": running, "parts": parts}.items()


def send_signal():
    sent = folder() / "signal_sent"
    this_rank = "last_node" if "LAST_NODE" in os.environ else str(get_rank())
    if os.environ.get("PROBE_STEP") != str(state.steps):
        return
    if this_rank != os.environ["PROBE_RANK"] or sent.exists():
        return
    sent.touch()
    signum = int(os.environ["PROBE_SIGNAL"])
    workers = [worker.pid for worker in multiprocessing.active_children()]
    write(
        handled=signal.getsignal(signum) != signal.SIG_DFL,
        reaches_workers=any(os.getpgid(pid) == os.getpgrp() for pid in workers),
    )
    if this_rank == "last_node":
        os.kill(os.getppid(), signum)
    os.killpg(os.getpgrp(), signum)  # its data workers, too


def note_loader(result, self, loader):
    write(place=witness.place(), **witness_batches.description(self))


def note_device(device):
    write(bound=f"cuda:{device}" if isinstance(device, int) else str(device))


def manual_seed(seed):
    """Lets each rank draw weights of its own."""
    return original["manual_seed"](seed + int(os.environ.get("RANK", 0)))


def slowed(clock):
    return lambda: clock() + state.steps * float(os.environ["PROBE_STEP_S"])


class LateWork:
    """A sum of all ranks that is there from wait() on alone, as in a slow network."""

    def __init__(self, collective, tensor, *args, **options):
        global running
        self.tensor = tensor
        if collective != "all_reduce":
            tensor.zero_()  # which receives the sum, and may not be initialized
        self.result = tensor.clone()
        self.work = original[collective](self.result, *args, **options, async_op=True)
        self.waited = False
        running += 1

    def __getattr__(self, name):
        return getattr(self.work, name)

    def wait(self, *args):
        global running
        done = self.work.wait(*args)
        if not self.waited:
            self.tensor.copy_(self.result)
            self.waited = True
            running -= 1
        return done


def late(name):
    """Returns a collective whose first argument receives a sum."""

    def collective(tensor, *args, async_op=False, **options):
        if async_op:
            return LateWork(name, tensor, *args, **options)
        return original[name](tensor, *args, **options)

    return collective


def install():
    if "PRETEND_GPUS" in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        importlib.import_module("rankcheck.pretend_gpus.tensor")
        witness.observe("ends", torch.cuda, "set_device", before=note_device)
    witness.install()
    witness_order.install()
    witness.observe("data", dataloader._BaseDataLoaderIter, "__init__", after=note_loader)
    register_module_forward_pre_hook(note_gathered)
    state.details.append(note_progress)
    state.after_step.append(send_signal)
    if "PROBE_FLOAT64" in os.environ:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # to which a loss casts its logits
        torch.cuda.is_bf16_supported = lambda including_emulation=True: False
    if "PROBE_STEP_S" in os.environ:
        for name in ("monotonic", "perf_counter", "time"):
            setattr(time, name, slowed(getattr(time, name)))
    if "PROBE_OWN_WEIGHTS" in os.environ:
        torch.manual_seed = manual_seed
    for name in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor"):
        original[name] = getattr(dist, name)
        setattr(dist, name, late(name))
