"""Writes down what a process of a training does, line by line, for tools/watch.

Into a file of its own in the folder WATCH_FOLDER goes a line of JSON for each line of the script
WATCH_FILE that begins, and for each operation of torch.distributed: the number of the line, the
name of the collective or None, the values that have changed, the ranks of its group if they are not
all, the operation, and whether the call before it goes on. The result stays the same, bit for bit.
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
from torch._C._distributed_c10d import ProcessGroup
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader, get_worker_info

MAX_STEPS, MAX_EVENTS = 20, 2000
LEFT_OUT = ("parse_args", "forward", "__getitem__", "__len__")
VERBS = {"allgather": "all-gather", "allreduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
IN_DDP = {
    "_verify_param_shape_across_processes": "compare the shapes of the weights",
    "_sync_module_states": "broadcast the weights",
    "_sync_buffers": "broadcast the buffers",
    "_pre_forward": "agree on buckets",
}
COLLECTIVES = dist.distributed_c10d.__all__
script = os.environ["WATCH_FILE"]
file = None
events = 0
steps = 0
line = 0  # of the script, that runs now
changed = {}  # since the last event
known = {}
model = None
parameter = None  # its last one: its first element stands for all
last_call = None  # of torch.distributed: its outermost frame, its name, and the event's number
started = []  # the collectives that the script has started and not waited for


def write(collective=None, ranks=None, operation=None, goes_on=False):
    global file, events
    if not line:  # the script has not begun
        return
    if file is None:
        file = open(f"{os.environ['WATCH_FOLDER']}/{os.getpid()}.jsonl", "a")  # noqa: SIM115
    if get_worker_info() is None and steps < MAX_STEPS and events < MAX_EVENTS:
        file.write(json.dumps([line, collective, changed, ranks, operation, goes_on]) + "\n")
        file.flush()  # so that it is there if this process hangs or is killed
        events += 1
    elif events:
        Path(file.name).with_suffix(".full").touch()
    changed.clear()


def note(name, value):
    if isinstance(value, torch.Tensor):
        value = local(value).detach().flatten()[:1]  # the first element of this rank's part
        value = value.item() if value.untyped_storage().size() else "none"
    if isinstance(value, float):
        value = f"{value:.6g}"
    if known.get(name) != str(value):
        known[name] = changed[name] = str(value)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
    for name in ("epochs_run", "samples_run", "stop_requested", "total_loss", "loss"):
        value = names.get(name)
        if value is None and name != "loss":
            value = getattr(names.get("self"), name, None)
        if isinstance(value, bool | int | float) or getattr(value, "ndim", None) == 0:
            note(name, value)
    note_model()


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


def name_of(operation, frames, size):
    """Names an operation by who calls it: DDP, FSDP, or a function that the script calls."""
    functions = [frame.f_code.co_name for frame in frames]
    places = " ".join(frame.f_code.co_filename for frame in frames)
    verb = next((VERBS[v] for v in VERBS if v in operation), operation.strip("_"))
    if "/parallel/distributed.py" in places:
        return "DDP: " + next((IN_DDP[name] for name in functions if name in IN_DDP), verb)
    if functions[-1:] in (["_wrapped_call_impl"], ["backward"]):  # a forward or backward pass
        if "/distributed/tensor/" in places:
            return f"DTensor: {verb} {size:,} numbers"
        owner = "FSDP" if "/_fully_shard/" in places else "DDP"
        return f"{owner}: {verb} {size:,} {'weights' if verb == 'all-gather' else 'gradients'}"
    called = [f for f in functions if not f.startswith(("_", "<")) and "wrap" not in f]
    owner = next((f for f in reversed(called) if f != "decorate_context"), verb)
    return owner if owner in COLLECTIVES else f"{owner}: {verb} {size:,} numbers"


def note_collective(operation, call, keys, *arguments):
    """Writes down an operation of torch.distributed, whoever calls it, and then runs it."""
    global last_call
    frame, frames = sys._getframe(1), []
    while frame and frame.f_code.co_filename != script:
        frames.append(frame)
        frame = frame.f_back
    group = next(value for value in arguments if isinstance(value, torch.ScriptObject))
    ranks = dist.get_process_group_ranks(ProcessGroup.unbox(group))
    tensors = [[t for t in tree_leaves(part) if torch.is_tensor(t)] for part in arguments[:2]]
    name = name_of(operation, frames, max(sum(t.numel() for t in part) for part in tensors))
    if any(frame.f_locals.get("async_op") for frame in frames) and name in COLLECTIVES:
        started.append((name, ranks if len(ranks) < dist.get_world_size() else None))
        name, ranks = f"starts {name}", [dist.get_rank()]
    elif operation.startswith(("send", "recv")):
        name, ranks = f"calls {name}", [dist.get_rank()]
    outermost = frames[-1] if frames else None
    goes_on = last_call == (outermost, name, events)
    with contextlib.suppress(Exception):
        note_model()
    write(name, ranks if len(ranks) < dist.get_world_size() else None, operation, goes_on)
    last_call = (outermost, name, events)
    return call.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *arguments)


def note_wait(work, *arguments):
    if sys._getframe(1).f_code.co_filename == script and started:
        write(*started.pop(0))
    return wait(work, *arguments)


def note_init(*arguments, **options):
    write("init_process_group")
    return init_process_group(*arguments, **options)


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


def begin_step(module=None, inputs=None):
    """Counts the step that begins; the first module that is called is the model."""
    global model, parameter
    if torch.is_grad_enabled():
        note("step", steps + 1)
    trained = [p for p in module.parameters() if p.requires_grad] if module else []
    if model is None and trained:
        model, parameter = module, trained[-1]
        if dist.is_initialized():
            parameter.register_hook(lambda gradient: note("own gradient", gradient))


def end_step(optimizer, arguments, options):
    """Counts a step, and does after it what tools/watch/series.py asks for."""
    global steps
    steps += 1
    state = [local(t) for t in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(t)]
    note("optimizer state here", sum(t.numel() for t in state if t.ndim))
    time.sleep(float(os.environ.get("WATCH_PAUSE", 0)))
    rank = dist.get_rank() if dist.is_initialized() else 0
    at, _, signum = os.environ.get("WATCH_SIGNAL", "").rpartition(" ")
    if at == f"{rank} {steps}" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), int(signum))


def note_samples():
    """Notes the samples of each batch that a DataLoader yields."""
    loader = dataloader._BaseDataLoaderIter
    asked = []  # the samples of the batches that are loaded, or soon will be
    next_index, next_batch = loader._next_index, loader.__next__

    def note_index(self):
        asked.append(next_index(self))
        return asked[-1]

    def note_batch(self):
        batch = next_batch(self)
        samples = asked.pop(0)
        begin_step()
        note("samples", " ".join(map(str, samples if isinstance(samples, list) else [samples])))
        return batch

    loader._next_index, loader.__next__ = note_index, note_batch


library = torch.library.Library("c10d", "IMPL")
wait, init_process_group = dist.Work.wait, dist.init_process_group


def install():
    for name in torch._C._dispatch_get_all_op_names():
        call = getattr(torch.ops.c10d, name.removeprefix("c10d::"), None)
        if name.startswith("c10d::") and "process_group" in str(call.default._schema):
            noted = functools.partial(note_collective, name.removeprefix("c10d::"), call.default)
            library.impl(name, noted, "BackendSelect", with_keyset=True)  # the first in any call
    dist.Work.wait, dist.init_process_group = note_wait, note_init
    register_module_forward_pre_hook(begin_step)
    register_optimizer_step_post_hook(end_step)
    note_samples()
    sys.stdout = Output(sys.stdout)
    os.register_at_fork(after_in_child=lambda: sys.settrace(None))  # a data worker
    sys.settrace(trace)
