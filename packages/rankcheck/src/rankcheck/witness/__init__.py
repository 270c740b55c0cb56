"""Writes down what each process of a training does.

Each process writes a line of JSON per event into a file of its own in the folder WITNESS_FOLDER.
What is computed stays the same, bit for bit. An error of the witness never reaches the script: it
is written into a file of its own, with its subject. At SIGUSR1, a process writes into a file of its
own at which line it is.
"""

import faulthandler
import functools
import hashlib
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import signal_handling

STANDARD_LIBRARY = os.path.dirname(os.__file__)
TORCH = os.path.dirname(torch.__file__) + os.sep
# The folder of a script that is itself installed, as rankcheck -m may name one: a virtual
# environment below the folder of another script holds libraries.
INSTALLED_SCRIPT = os.path.dirname(os.environ.get("WITNESS_SCRIPT", "")) + os.sep
if "site-packages" not in INSTALLED_SCRIPT:
    INSTALLED_SCRIPT = "none"
original = {"open": open, "save": torch.save, "load": torch.load}
ours = [str(Path(__file__).parents[1])]  # folders whose code is never the script's


class State:
    """What this process has done, and what is to be called when it does more."""

    def __init__(self):
        self.samples = []  # that a backward pass has used since its last step
        self.steps = 0
        self.in_closure = False  # while an optimizer's step computes the gradients itself
        self.passes = 0  # how many backward passes have begun
        self.roots = []  # the modules that the training loop calls, such as DDP's
        self.inner = set()  # what they call
        self.called = None  # the root that runs
        self.depth = 0  # how many functions of the witness run, the one in the other
        self.details = []  # functions of an optimizer, parameters: what else a step's event has
        self.after_backward = []  # functions to call when a backward pass comes to a root's output
        self.after_step = []  # functions to call when a step is written down
        # Of batches.
        self.batch_of = None  # the iterator of a DataLoader whose batch came last
        self.indices = []  # of the samples that have come for training since the last step
        self.change = []  # functions that may give the script another batch than the one that came
        self.seeded = set()  # the libraries that a data set has given a seed, for this batch
        # Of optimizers, and of the models that they train.
        self.optimizers = []
        self.schedules = weakref.WeakSet()
        self.followed = weakref.WeakValueDictionary()  # the optimizers' parameters, by id
        self.wrapped = {}  # the parameters that DDP averages, and whether it looks for unused ones
        self.evaluated = set()  # the models that were called without gradients
        self.evaluates = False  # whether one was since the last backward pass
        self.stale_noted = False
        self.line = ""  # what is printed since the last end of a line
        # Since the last step.
        self.products = {}  # of the gradients that this process has computed, by parameter
        self.last_syncs = False  # whether the last pass has averaged it
        self.eval_place = ""  # the line that has last called eval()
        self.syncs = {}  # the passes that have averaged a parameter's gradient
        self.losses = []  # on which a backward pass was called, and of how many samples
        self.means = []  # of the passes, where an undivided mean was; "" for another loss
        self.on_file_event = []  # functions of what rank 0 does to a file: see witness.files
        self.meetings = 0  # how many collectives and barriers the script has called
        self.talks = set()  # the collectives that the script has called
        self.waits = set()  # the lines that have waited for the GPU
        self.is_on_gpu = lambda tensor: True  # whether a real GPU would hold it
        self.random_state = ""  # of torch, when the last root was called
        self.float16 = ""  # the line that lets a training compute so
        self.half = False  # whether anything was computed in 16 bits
        self.others = False  # whether it calls a model that no optimizer trains
        self.untrained = None  # at first, the sum of the weights that no optimizer trains
        self.scaler = None  # which has scaled a loss


state = State()


def folder():
    return Path(os.environ["WITNESS_FOLDER"])


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def write(**event):
    if get_worker_info() is None:  # else a data worker
        with original["open"](folder() / f"{os.getpid()}.jsonl", "a") as file:
            line = {"rank": get_rank(), "at": state.steps, "passes": state.passes, **event}
            file.write(json.dumps(line) + "\n")


def note_failure(subject, error):
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_ours(f.filename)]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
    with original["open"](folder() / f"{os.getpid()}.failed", "a") as file:
        file.write(json.dumps([subject, f"{place}: {type(error).__name__}: {error}"]) + "\n")


def is_of_handler(error):
    """Whether an error comes from the script's handler of SIGTERM, which Python calls anywhere."""
    handler = signal.getsignal(signal.SIGTERM)
    called = handler if hasattr(handler, "__code__") else type(handler).__call__
    code = getattr(called, "__code__", None)
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def held(subject, function):
    """Returns a function whose errors stay here: what asks about `subject` then is not asked."""

    @functools.wraps(function)
    def call(*args, **options):
        state.depth += 1
        try:
            return function(*args, **options)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            # The death of a data worker comes here.
            if frame.filename == signal_handling.__file__ or is_of_handler(error):
                raise
            note_failure(subject, error)
            return None
        finally:
            state.depth -= 1

    return call


def observe(subject, owner, name, before=None, after=None):
    """Lets `before` see the arguments of each call of `owner.name`, and `after` its result first.

    What is called gets its own arguments, and its errors are those of the script.
    """
    call = getattr(owner, name)
    before, after = (function and held(subject, function) for function in (before, after))

    @functools.wraps(call)
    def observed(*args, **options):
        if before:
            before(*args, **options)
        result = call(*args, **options)
        if after:
            after(result, *args, **options)
        return result

    setattr(owner, name, observed)


def is_ours(path):
    return path.startswith(tuple(ours))


def is_library_file(path):
    if is_ours(path) or path.startswith((STANDARD_LIBRARY, "<")):
        return True
    return "site-packages" in path and not path.startswith(INSTALLED_SCRIPT)


def is_library(frame):
    return is_library_file(frame.f_code.co_filename)


def place():
    """Returns the file and the line of the script that has called what is noted."""
    frame = sys._getframe(1)
    while frame and is_library(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def caller():
    """Returns the same, or "" if torch itself has called it; other packages call for the script."""
    frame = sys._getframe(1)
    while frame and is_library(frame):
        if frame.f_code.co_filename.startswith(TORCH):
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


def hashes(*tensors):
    """Returns a hash of each sample of a batch, of which each tensor has a row."""
    rows = [t.detach().cpu() for t in tensors]
    rows = [t.flatten(1) if t.ndim > 1 else t[:, None] for t in rows]
    rows = [t.contiguous().view(torch.uint8).numpy() for t in rows]  # NumPy has no bfloat16
    return [
        hashlib.blake2b(b"".join(part.tobytes() for part in row), digest_size=8).hexdigest()
        for row in zip(*rows, strict=True)
    ]


def tensors_of(values):
    return [leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def rows(values):
    """Returns the tensors of `values` with a row per sample, which the first of them counts."""
    tensors = [t for t in map(local, tensors_of(values)) if t.ndim and t.layout == torch.strided]
    return [t for t in tensors if len(t) == len(tensors[0])]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trains(module):
    """Whether a call of this module may be part of a step: the call of a loss function is none."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def note_call(module, inputs):
    if state.called is None and module not in state.inner and trains(module):
        state.called = module
        if module not in state.roots:
            state.roots.append(module)
            state.inner.update(set(module.modules()) - {module})


def note_return(module, inputs, *options_and_output):
    """Counts the samples of a forward pass when a backward pass comes to its output.

    After an exception, torch leaves the options out.
    """
    if module is not state.called:
        return
    state.called = None
    *options, output = options_and_output
    outputs = [t for t in tensors_of(output) if t.requires_grad]
    if not outputs or is_functorch_wrapped_tensor(outputs[0]):  # whose values nobody can read
        return
    hashed = hashes(*rows((inputs, options)))

    def count(gradient):
        state.samples.extend(hashed)
        hook.remove()
        for function in state.after_backward:
            function()

    hook = outputs[0].register_hook(held("steps", count))


def sum_of(tensors):
    return sum(local(t).detach().double().sum().item() for t in tensors)


def note_step(optimizer, args, options):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    more = {"state": sum_of(tensors_of(dict(optimizer.state)))}
    for detail in state.details:
        more |= dict(held("steps", detail)(optimizer, parameters) or ())
    if not state.samples and not more.get("has_gradient") and not more.get("largest"):
        if args[1:] or options.get("closure"):
            state.in_closure = True  # the step itself computes gradients, perhaps several times
            return write(closure=True)
        write(no_gradient=True, place=place())
        return  # torch.distributed.checkpoint takes a step to make the optimizer's state
    try:
        write_step(parameters, more)
    finally:
        end_step()


def note_step_end(optimizer, args, options):
    state.in_closure = False


def write_step(parameters, more):
    parts = [local(p) for p in parameters]
    if state.steps == 0:
        original["save"]([p.detach().cpu() for p in parts], folder() / f"{os.getpid()}.initial")
    modules = [module for root in state.roots for module in root.modules()]
    own = [module for module in modules if next(module.parameters(recurse=False), None) is not None]
    write(
        samples=state.samples[:],
        indices=state.indices[:],
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        weights=sum_of(parts),
        held=sum(p.numel() for p in parts),
        random_state=hashlib.blake2b(torch.get_rng_state().numpy()).hexdigest(),
        device=str(parts[0].device),
        training=any(module.training for module in own),
        wrappers=sum(isinstance(module, DistributedDataParallel) for module in set(modules)),
        **more,
    )


def end_step():
    state.samples.clear()
    state.indices.clear()
    for function in state.after_step:
        function()
    state.steps += 1


def of_all_ranks(device_mesh=None, process_group=None, **options):
    """Whether DDP gets all ranks, and no group of them."""
    size = device_mesh.size() if device_mesh else dist.get_world_size(process_group)
    return size == dist.get_world_size()


def path_of(file):
    """Returns the path of a file, or of an open one; "" if it has no name."""
    path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "")
    return os.path.abspath(path) if path and isinstance(path, str | os.PathLike) else ""


def note_save(path, **more):
    """Notes where something is saved: "" is what has no name."""
    path = path_of(path)
    inode = os.stat(path).st_ino if os.path.exists(path) else None  # of what is written over
    write(saved=path, inode=inode, meetings=state.meetings, place=place(), **more)


def has_some_states(value):
    """Whether an optimizer has returned this as its state, and has that of some parameters only."""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return False
    return 0 < len(value["state"]) < sum(len(group["params"]) for group in value["param_groups"])


def note_torch_save(obj, f, *args, **options):
    if caller():  # else torch.distributed.checkpoint
        path = f if isinstance(f, str | os.PathLike) else getattr(f, "name", "")
        outside = sys._getframe(1)
        while is_ours(outside.f_code.co_filename):
            outside = outside.f_back
        leaves = [leaf for leaf in tree_leaves(obj) if hasattr(leaf, "to_local")]
        part = any(leaf.to_local().numel() < leaf.numel() for leaf in leaves)
        some = any(map(has_some_states, tree_leaves(obj, is_leaf=has_some_states)))
        note_save(path, by_library=is_library(outside), part=part, some_states=some)


def note_load(f, map_location=None, *args, **options):
    write(loaded_to=str(map_location), loaded=path_of(f), place=place())


def note_joining(backend=None, *args, device_id=None, **options):
    write(backend=backend or "cpu:gloo,cuda:nccl")  # which torch makes of none
    if device_id is not None:
        write(bound=str(device_id))


def note_joined(*args, **options):
    write(joined=dist.get_world_size())  # from here on, its rank is known


def wait_for_gloo(group=None):
    """Lets gloo's thread drop its last tensor, for which it needs the GIL.

    Where a DDP model outlives the process group, the destructor waits for that thread with the GIL.
    """
    time.sleep(0.1)


def note_leaving(group=None):
    if group in (None, dist.GroupMember.WORLD):
        write(left=True)
    wait_for_gloo()


def watch_lines():
    """At SIGUSR1, this process writes at which line it is."""
    stack = open(folder() / f"{os.getpid()}.stack", "w")  # noqa: SIM115  faulthandler keeps it
    stack.write(os.environ.get("RANK", "") + "\n")
    stack.flush()
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)


def load_observer(path):
    """Returns the module of an observer, whose functions are not the script's."""
    name = f"observer_{os.path.basename(path).removesuffix('.py')}"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    ours.append(os.path.dirname(path))
    spec.loader.exec_module(module)
    return module


def install():
    watch_lines()
    observe("saves", torch, "save", before=note_torch_save)
    observe("saves", torch, "load", before=note_load)
    observe("ends", dist, "init_process_group", before=note_joining, after=note_joined)
    observe("ends", dist, "destroy_process_group", before=note_leaving)
    register_module_forward_pre_hook(held("steps", note_call))
    returned = held("steps", note_return)
    register_module_forward_hook(returned, with_kwargs=True, always_call=True)
    register_optimizer_step_pre_hook(held("steps", note_step))
    register_optimizer_step_post_hook(held("steps", note_step_end))
