"""Notes each operation of torch.distributed, whoever calls it: Python, DDP in C++, a hook, FSDP."""

import contextlib
import functools
import os
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from rankcheck.watch import events, values
from rankcheck.witness import observe, tensors_of, wait_for_gloo

VERBS = {"allgather": "all-gather", "allreduce": "all-reduce", "reduce_scatter": "reduce-scatter"}
IN_DDP = {
    "_verify_param_shape_across_processes": "compare the shapes of the weights",
    "_sync_module_states": "broadcast the weights",
    "_sync_buffers": "broadcast the buffers",
    "_pre_forward": "agree on buckets",
}
COLLECTIVES = dist.distributed_c10d.__all__
script = os.environ["WATCH_FILE"]
last_call = None  # its outermost frame, its name, and the number of the event
started = []  # the collectives that the script has started and not waited for
library = torch.library.Library("c10d", "IMPL")
wait, init_process_group = dist.Work.wait, dist.init_process_group


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
    sizes = [sum(tensor.numel() for tensor in tensors_of(part)) for part in arguments[:2]]
    name = name_of(operation, frames, max(sizes))
    ranks = ranks if len(ranks) < dist.get_world_size() else None  # all
    if any(frame.f_locals.get("async_op") for frame in frames) and name in COLLECTIVES:
        started.append((name, ranks))
        name, ranks = f"starts {name}", [dist.get_rank()]
    elif operation.startswith(("send", "recv")):
        name, ranks = f"calls {name}", [dist.get_rank()]
    outermost = frames[-1] if frames else None
    goes_on = last_call == (outermost, name, events.count)
    with contextlib.suppress(Exception):
        values.note_model()
    events.write(name, ranks, operation, goes_on)
    last_call = (outermost, name, events.count)
    return call.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *arguments)


def note_wait(work, *arguments):
    if sys._getframe(1).f_code.co_filename == script and started:
        events.write(*started.pop(0))
    return wait(work, *arguments)


def note_init(*arguments, **options):
    events.follow_this_thread()
    events.write("init_process_group")
    return init_process_group(*arguments, **options)


def install():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    for operation in [name.removeprefix("c10d::") for name in names]:
        call = getattr(torch.ops.c10d, operation).default
        if "process_group" in str(call._schema):
            noted = functools.partial(note_collective, operation, call)
            # Every call, also one from C++, comes by this key before it comes to a backend's.
            library.impl(operation, noted, "BackendSelect", with_keyset=True)
    dist.Work.wait, dist.init_process_group = note_wait, note_init
    observe("ends", dist, "destroy_process_group", before=wait_for_gloo)
