"""Writes down what each process of a training does, for tools/judge/check.py.

Each process writes a line of JSON per event into a file of its own in the folder PROBE_FOLDER. At
its step PROBE_STEP, counted from 0, the rank PROBE_RANK sends itself the signal PROBE_SIGNAL, once;
if it is "last_node", the ranks with LAST_NODE set do, and to their launcher, too. By
Python's clocks, each step takes PROBE_STEP_S seconds longer. At SIGUSR1, a process writes into a
file of its own at which line it is.
"""

import faulthandler
import hashlib
import importlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

samples = []  # of this process that a backward pass has used since its last step
steps = 0
outermost = None  # the module that the training loop calls, such as DDP's
gathered = 0  # the most parameters that were in this process's memory at once
original = {"save": torch.save, "load": torch.load, "manual_seed": torch.manual_seed}
running = 0  # sums of all ranks that this process has started and not waited for


def folder():
    return Path(os.environ["PROBE_FOLDER"])


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def write(**event):
    with open(folder() / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"rank": get_rank(), **event}) + "\n")


def hashes(inputs):
    """Returns a hash of each sample of a batch."""
    rows = inputs.detach().cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def in_memory(parameter):
    """Returns how many of its numbers are in memory, which by_hand/fsdp.py takes and gives back."""
    tensor = local(parameter)
    return tensor.numel() if tensor.untyped_storage().nbytes() else 0


def has_parameters(module, recurse=True):
    return next(module.parameters(recurse), None) is not None


def note_inputs(module, inputs):
    global outermost, gathered
    if torch.is_grad_enabled() and inputs and has_parameters(module):  # a loss function has none
        outermost = outermost or module
        gathered = max(gathered, sum(map(in_memory, outermost.parameters())))


def note_output(module, inputs, output):
    """Counts the samples of a forward pass when a backward pass comes to its output."""
    outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if module is not outermost or not outputs:
        return
    hashed = hashes(inputs[0])

    def count(gradient):
        samples.extend(hashed)
        hook.remove()

    hook = outputs[0].register_hook(count)


def note_step(optimizer, args, options):
    global steps
    if not samples:  # torch.distributed.checkpoint takes a step to make the optimizer's state
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [local(p) for p in parameters]
    if steps == 0:
        original["save"]([p.detach().cpu() for p in held], folder() / f"{os.getpid()}.initial")
    write(
        samples=samples[:],
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        weights=sum(p.detach().double().sum().item() for p in held),
        held=sum(p.numel() for p in held),
        gathered=gathered,
        running=running,
        random_state=hashlib.blake2b(torch.get_rng_state().numpy()).hexdigest(),
        device=str(held[0].device),
        training=any(m.training for m in outermost.modules() if has_parameters(m, recurse=False)),
        wrappers=sum(isinstance(m, DistributedDataParallel) for m in outermost.modules()),
    )
    samples.clear()
    if os.environ.get("PROBE_STEP") == str(steps):
        send_signal()
    steps += 1


def send_signal():
    sent = folder() / "signal_sent"
    this_rank = "last_node" if "LAST_NODE" in os.environ else str(get_rank())
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


def save(*args, **options):
    write(saved=True)
    return original["save"](*args, **options)


def load(file, map_location=None, **options):
    write(loaded_to=str(map_location))
    return original["load"](file, map_location, **options)


def set_device(device):
    write(bound=f"cuda:{device}" if isinstance(device, int) else str(device))
    original["set_device"](device)


def init_process_group(backend=None, *args, device_id=None, **options):
    write(backend=backend or "cpu:gloo,cuda:nccl")  # which torch makes of none
    if device_id is not None:
        write(bound=str(device_id))
    original["init_process_group"](backend, *args, device_id=device_id, **options)
    write(joined=True)  # from here on, its rank is known


def manual_seed(seed):
    """Lets each rank draw weights of its own."""
    return original["manual_seed"](seed + int(os.environ.get("RANK", 0)))


def slowed(clock):
    return lambda: clock() + steps * float(os.environ["PROBE_STEP_S"])


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
    stack = open(folder() / f"{os.getpid()}.stack", "w")  # noqa: SIM115  faulthandler keeps it
    print(os.environ.get("RANK", ""), file=stack, flush=True)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    torch.save = save
    torch.load = load
    register_module_forward_pre_hook(note_inputs)
    register_module_forward_hook(note_output)
    register_optimizer_step_pre_hook(note_step)
    if "PRETEND_GPUS" in os.environ:
        importlib.import_module("pretend_tensor")
        original["set_device"] = torch.cuda.set_device
        torch.cuda.set_device = set_device
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
    original["init_process_group"] = dist.init_process_group
    dist.init_process_group = init_process_group
