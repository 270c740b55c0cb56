"""Writes down what each process of a training does, for tools/judge/check.py.

Each process writes a line of JSON per event into a file of its own in the folder PROBE_FOLDER. At
its step PROBE_STEP, counted from 0, the rank PROBE_RANK sends itself the signal PROBE_SIGNAL, once;
if it is "last_node", the ranks with LAST_NODE set do, and to their launcher, too. With PROBE_GPUS
set, torch believes in so many GPUs until the model is moved to one.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

samples = []  # of this process, since its last step
steps = 0
outermost = None  # the module that the training loop calls, such as DDP's
gathered = 0  # the most parameters that were in this process's memory at once
current_gpu = "cuda:0"
original = {"save": torch.save, "init_process_group": dist.init_process_group}


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


def note_inputs(module, inputs):
    global outermost, gathered
    if module.training and torch.is_grad_enabled() and inputs:
        outermost = outermost or module
        if module is outermost:
            samples.extend(hashes(inputs[0]))
        gathered = max(gathered, sum(local(p).numel() for p in outermost.parameters()))


def note_step(optimizer, args, options):
    global steps
    if not samples:  # torch.distributed.checkpoint takes a step to make the optimizer's state
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [local(p) for p in parameters]
    if steps == 0:
        original["save"]([p.detach() for p in held], folder() / f"{os.getpid()}.initial")
    write(
        samples=samples[:],
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        weights=sum(p.detach().double().sum().item() for p in held),
        held=sum(p.numel() for p in held),
        gathered=gathered,
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
    if this_rank == "last_node":
        os.kill(os.getppid(), int(os.environ["PROBE_SIGNAL"]))
    os.kill(os.getpid(), int(os.environ["PROBE_SIGNAL"]))


def save(*args, **options):
    write(saved=True)
    return original["save"](*args, **options)


def gpu(device):
    """Returns the name of a GPU; without a number, that of the current one."""
    name = f"cuda:{device}" if isinstance(device, int) else str(device)
    return current_gpu if name == "cuda" else name


def set_device(device):
    global current_gpu
    current_gpu = gpu(device)
    write(bound=current_gpu)


def init_process_group(*args, backend=None, device_id=None, **options):
    write(backend=args[0] if args else backend)
    original["init_process_group"]("gloo", *args[1:], **options)
    if device_id is not None:
        set_device(device_id)


def move_and_exit(module, device="cuda", *args, **options):
    write(moved=gpu(device))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


def install():
    torch.save = save
    register_module_forward_pre_hook(note_inputs)
    register_optimizer_step_pre_hook(note_step)
    if "PROBE_FLOAT64" in os.environ:
        torch.set_default_dtype(torch.float64)
    if "PROBE_GPUS" in os.environ:
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: int(os.environ["PROBE_GPUS"])
        torch.cuda.set_device = set_device
        dist.init_process_group = init_process_group
        nn.Module.to = nn.Module.cuda = move_and_exit
