"""Notes the values that differ between ranks: samples, losses, gradients, and what a rank holds."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Subset

from rankcheck.watch import events
from rankcheck.watch.events import note
from rankcheck.witness import local, tensors_of
from rankcheck.witness.batches import follow_batches

model = None
parameter = None  # its last one: its first element stands for all


def note_model():
    """Notes the weights that this rank has now (freed ones have no storage), and one of them."""
    if model is not None:
        tensors = [local(p) for p in model.parameters()]
        note("weights here", sum(t.numel() for t in tensors if t.untyped_storage().size()))
        note("weight", parameter)
        if parameter.grad is not None:
            note("gradient", parameter.grad)


def note_values(frame):
    """Notes what one wants to see of the script's variables, where it has them by these names."""
    names = frame.f_locals
    for name in ("local_rank", "rank", "world_size", "epoch"):
        if isinstance(names.get(name), int):
            note(name, names[name])
    if isinstance(names.get("device"), torch.device):
        note("device", names["device"])
    if dist.is_initialized():
        note("rank", dist.get_rank())
    note("attempt", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for name in ("epochs_run", "samples_run", "stop_requested", "totals", "loss"):
        value = names.get(name)
        if value is None and name != "loss":
            value = getattr(names.get("self"), name, None)
        if name == "totals" and isinstance(value, torch.Tensor):  # of losses and of samples
            note(name, ", ".join(f"{total:.6g}" for total in value.tolist()))
        elif isinstance(value, bool | int | float) or getattr(value, "ndim", None) == 0:
            note(name, value)
    note_model()


def begin_step(module=None, inputs=None):
    """Counts the step that begins; the first module that is called is the model."""
    global model, parameter
    if torch.compiler.is_compiling():  # a part of what was called, into which the compiler looks
        return
    events.follow_this_thread()
    if torch.is_grad_enabled():
        note("step", events.steps + 1)
    # A compiled module has no truth value.
    trained = [p for p in module.parameters() if p.requires_grad] if module is not None else []
    if model is None and trained:
        model, parameter = module, trained[-1]
        if dist.is_initialized():
            parameter.register_hook(lambda gradient: note("own gradient", gradient))


def end_step(optimizer, arguments, options):
    """Counts a step, and does after it what WATCH_PAUSE and WATCH_SIGNAL ask for."""
    events.steps += 1
    state = map(local, tensors_of(dict(optimizer.state)))
    note("optimizer state here", sum(t.numel() for t in state if t.ndim))
    time.sleep(float(os.environ.get("WATCH_PAUSE", 0)))
    rank = dist.get_rank() if dist.is_initialized() else 0
    at, _, signum = os.environ.get("WATCH_SIGNAL", "").rpartition(" ")
    if at == f"{rank} {events.steps}" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), int(signum))


def note_samples(iterator, batch, samples):
    if batch is not None:
        begin_step()
        dataset = iterator._dataset
        while isinstance(dataset, Subset):
            samples = [dataset.indices[sample] for sample in samples]
            dataset = dataset.dataset
        if None not in samples:  # else those of a stream, which have no numbers
            note("samples", " ".join(map(str, samples)))
    return batch


def install():
    register_module_forward_pre_hook(begin_step)
    register_optimizer_step_post_hook(end_step)
    follow_batches(note_samples)
