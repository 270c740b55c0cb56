"""Writes down what a process of a training does, line by line, for tools/watch.

Into a file of its own in the folder WATCH_FOLDER goes a line of JSON for each line of the script
WATCH_FILE that begins, and for each collective: the number of the line, the collective or None, and
the values that have changed. What is computed stays the same, bit for bit.
"""

import ast
import contextlib
import functools
import inspect
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader, get_worker_info

MAX_STEPS, MAX_EVENTS = 20, 2000
LEFT_OUT = ("parse_args", "forward", "__getitem__", "__len__")
COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "init_process_group",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]
script = os.environ["WATCH_FILE"]
file = None
events = 0
steps = 0
line = 0  # of the script, that runs now
changed = {}  # since the last event
known = {}
model = None
parameter = None  # its last one: its first element stands for all
inside = False  # a collective: those that it calls are its own


def write(collective=None):
    global file, events
    if not line:  # the script has not begun
        return
    if file is None:
        file = open(f"{os.environ['WATCH_FOLDER']}/{os.getpid()}.jsonl", "a")  # noqa: SIM115
    if get_worker_info() is None and steps < MAX_STEPS and events < MAX_EVENTS:
        file.write(json.dumps([line, collective, changed]) + "\n")
        file.flush()  # so that it is there if this process hangs or is killed
        events += 1
    elif events:
        Path(file.name).with_suffix(".full").touch()
    changed.clear()


def note(name, value):
    if isinstance(value, float):
        value = f"{value:.6g}"
    if known.get(name) != str(value):
        known[name] = changed[name] = str(value)


def local(tensor):
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def first(tensor):
    """Returns the first element of a tensor, or of this rank's part of one."""
    tensor = local(tensor)
    return tensor.detach().flatten()[0].item() if tensor.numel() else "none"


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
    me = names.get("self")
    for name in ("epochs_run", "samples_run", "stop_requested", "total_loss"):
        value = names.get(name, getattr(me, name, None))
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = first(value)
        if value is not None:
            note(name, value)
    loss = names.get("loss")
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        note("loss", first(loss))
    if parameter is not None:
        tensors = [local(p) for p in model.parameters()]  # freed ones have no storage
        here = sum(t.numel() for t in tensors if t.untyped_storage().size())
        note("weights here", here)
        note("weight", first(parameter))
        if parameter.grad is not None:
            note("gradient", first(parameter.grad))


def top_lines():
    """Returns the lines at the top of the script, if its loop is there; definitions are none."""
    with open(script) as source:
        nodes = ast.parse(source.read()).body
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in nodes if not isinstance(node, definitions)]
    if not any(isinstance(part, ast.For | ast.While) for n in nodes for part in ast.walk(n)):
        return set()
    return {number for n in nodes for number in range(n.lineno, n.end_lineno + 1)}


TOP_LINES = top_lines()


def trace(frame, event, argument):
    code = frame.f_code
    if code.co_filename != script or code.co_name in LEFT_OUT:
        return None
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    if not is_function and not (code.co_name == "<module>" and TOP_LINES):
        return None

    def trace_line(frame, event, argument):
        global line
        if event == "line" and (is_function or frame.f_lineno in TOP_LINES):
            with contextlib.suppress(Exception):  # what has no value now, or is another thing
                note_values(frame)
            line = frame.f_lineno
            write()
        return trace_line

    return trace_line


def recorded(name, function):
    """Returns a collective that is written down before it begins."""

    @functools.wraps(function)
    def call(*arguments, **options):
        global inside
        if inside:
            return function(*arguments, **options)
        if options.get("async_op"):
            return Work(function(*arguments, **options), name)
        inside = True
        try:
            write(name)
            return function(*arguments, **options)
        finally:
            inside = False

    return call


class Work:
    """A collective that has begun; who waits for it is in it."""

    def __init__(self, work, name):
        self.work = work
        self.name = name

    def __getattr__(self, name):
        return getattr(self.work, name)

    def wait(self, *arguments):
        return recorded(self.name, self.work.wait)(*arguments)


class RecordedDDP(DistributedDataParallel):
    """Writes down the collectives that DDP calls in C++."""

    def __init__(self, module, *arguments, **options):
        create = super().__init__
        recorded("DDP: compare and broadcast the weights", create)(module, *arguments, **options)
        self.parameters_left = set()
        self.forwards = 0
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self.note_gradient, parameter))

    def note_gradient(self, ready, gradient):
        if ready is parameter:
            note("own gradient", first(gradient))
        if not self.require_backward_grad_sync:
            return
        self.parameters_left.discard(ready)
        if not self.parameters_left:
            size = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
            write(f"DDP: all-reduce {size:,} gradients")

    def _pre_forward(self, *arguments, **options):
        if torch.is_grad_enabled():
            self.parameters_left = {p for p in self.module.parameters() if p.requires_grad}
            self.forwards += 1
        if self.forwards == 2 and torch.is_grad_enabled():
            return recorded("DDP: agree on buckets", super()._pre_forward)(*arguments, **options)
        return super()._pre_forward(*arguments, **options)


class Output:
    """Standard output, of which each line is noted."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        if text.strip():
            changed["log"] = changed.get("log", "") + text.strip("\r\n") + "\n"
        return self.stream.write(text)


def find_parameter(module, inputs):
    global model, parameter
    trained = [p for p in module.parameters() if p.requires_grad]
    if model is None and trained:
        model, parameter = module, trained[-1]


def count_step(*arguments):
    """Counts a step, and does after it what tools/watch/series.py asks for."""
    global steps
    steps += 1
    time.sleep(float(os.environ.get("WATCH_PAUSE", 0)))
    rank = dist.get_rank() if dist.is_initialized() else 0
    at, _, signum = os.environ.get("WATCH_SIGNAL", "").rpartition(" ")
    if at == f"{rank} {steps}" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), int(signum))


def install():
    for name in COLLECTIVES:
        setattr(dist, name, recorded(name, getattr(dist, name)))
    torch.nn.parallel.DistributedDataParallel = RecordedDDP
    register_module_forward_pre_hook(find_parameter)
    register_optimizer_step_post_hook(count_step)
    loader = dataloader._BaseDataLoaderIter
    asked = []  # the samples of the batches that are loaded, or soon will be
    next_index, next_batch = loader._next_index, loader.__next__

    def note_index(self):
        asked.append(next_index(self))
        return asked[-1]

    def note_batch(self):
        batch = next_batch(self)
        samples = asked.pop(0)
        note("samples", " ".join(map(str, samples if isinstance(samples, list) else [samples])))
        return batch

    loader._next_index, loader.__next__ = note_index, note_batch
    sys.stdout = Output(sys.stdout)
    os.register_at_fork(after_in_child=lambda: sys.settrace(None))  # a data worker
    sys.settrace(trace)
