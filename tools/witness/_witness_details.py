"""Notes what tools/audit asks for beside _witness.py: gradients, losses, printed numbers, saves.

Of a gradient, its product with a fixed vector is kept: that of a mean is the mean of the products.
"""

import functools
import os
import re
import sys
import weakref

import _witness as witness
import _witness_batches as witness_batches
import torch
import torch.distributed as dist
from _witness import hashes, is_library, local, place, write
from _witness_batches import digest
from torch.distributed import checkpoint
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

PATTERN = torch.cos(torch.arange(4096, dtype=torch.float64))
MAX_GRADIENTS = 40  # whose products are written down, of each step
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
original = {
    "add_param_group": torch.optim.Optimizer.add_param_group,
    "backward": torch.autograd.backward,
    "fsync": os.fsync,
    "item": torch.Tensor.item,
    "scale": torch.amp.GradScaler.scale,
    "wrap": DistributedDataParallel.__init__,
}
wrapped = {}  # the parameters that DDP should average, and whether it looks for unused ones
optimizers = []
followed = weakref.WeakValueDictionary()  # their parameters, by id
products = {}  # of the gradients that this process has computed since the last step, by parameter
syncs = {}  # how many passes since the last step have averaged a parameter's gradient
losses = []  # on which a backward pass was called since the last step
waits = set()  # the lines that have called item() of a loss since the last step
evaluated = set()  # the models that were called without gradients
synced = set()  # the inodes of files that are on the disk
scaler = None  # which has scaled a loss since the last step


def product(tensor):
    flat = local(tensor).detach().to_dense().flatten()[: len(PATTERN)]
    return float(flat.double() @ PATTERN[: len(flat)])


def averages():
    """Whether DDP averages the gradients of the backward pass that runs now."""
    wrappers = [root for root in witness.roots if isinstance(root, DistributedDataParallel)]
    return any(wrapper.require_backward_grad_sync for wrapper in wrappers)


def follow(optimizer, group):
    """Adds up the gradients of an optimizer's parameters, as they are before the ranks' mean."""

    def add(key, gradient):
        products[key] = products.get(key, 0.0) + product(gradient)
        syncs[key] = syncs.get(key, 0) + averages()

    original["add_param_group"](optimizer, group)
    if optimizer not in optimizers:
        optimizers.append(optimizer)
    for parameter in optimizer.param_groups[-1]["params"]:
        is_new = followed.get(id(parameter)) is not parameter  # to any optimizer
        if is_new and parameter.requires_grad and not hasattr(parameter, "to_local"):
            followed[id(parameter)] = parameter
            parameter.register_hook(functools.partial(add, id(parameter)))


@functools.wraps(original["wrap"])
def note_wrapper(ddp, module, *args, **options):
    searches = options.get("find_unused_parameters", False)
    wrapped.update((id(parameter), searches) for parameter in module.parameters())
    original["wrap"](ddp, module, *args, **options)


def drops(modules):
    return any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in modules)


def note_evaluation(module, inputs):
    models = [model for root in witness.roots for model in (root, getattr(root, "module", None))]
    if torch.is_grad_enabled() or module not in models or module in evaluated:
        return
    evaluated.add(module)
    is_ddp = isinstance(module, DistributedDataParallel)
    broadcasts = is_ddp and module.will_sync_module_buffers()
    write(broadcasts=broadcasts, drops=drops(module.modules()), place=place())


def note_backward(tensors, *args, **options):
    if torch.is_tensor(tensors) and tensors.numel() == 1:
        losses.append(float(local(tensors).detach()))
    return original["backward"](tensors, *args, **options)


def shard(parameter):
    """Returns which part of a parameter this rank holds: ranks with equal ones hold the same."""
    if not hasattr(parameter, "to_local"):
        return None
    mesh = parameter.device_mesh
    places = zip(parameter.placements, mesh.get_coordinate() or [], strict=False)
    return mesh.mesh.tolist(), [c if p.is_shard() else None for p, c in places]


def describe_gradients(parameters):
    trained = [p for p in parameters if p.requires_grad]
    all_used = all(id(p) in products for p in trained)
    own = [products.pop(id(p), None) for p in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    return {
        "own": own[:MAX_GRADIENTS],
        "used": [None if p.grad is None else product(p.grad) for p in parameters[:MAX_GRADIENTS]],
        "has_gradient": any(value is not None for value in own),
        "largest": max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0),
        "ddp": all(id(p) in wrapped for p in trained),
        "syncs": max((syncs.pop(id(p), 0) for p in parameters), default=0),
        "searches": all_used and any(wrapped.get(id(p)) for p in trained),
    }


def describe_shards(parameters, modules):
    world = (dist.get_world_size() if dist.is_initialized() else 1,)
    return {
        "sharded": any(hasattr(p, "to_local") for p in parameters),
        "shard": digest([shard(p) for p in parameters]),
        "whole": sum(p.numel() for p in parameters),
        "fsdp": any(isinstance(module, FSDPModule) for module in modules)
        and all(hasattr(p, "device_mesh") and p.device_mesh.shape == world for p in parameters),
    }


def describe(optimizer, parameters):
    """Returns what the event of a step has, too."""
    global scaler
    modules = {module for root in witness.roots for module in root.modules()}
    state = tree_leaves([list(values.values()) for values in optimizer.state.values()])
    more = describe_gradients(parameters) | describe_shards(parameters, modules)
    more |= {
        "optimizer": id(optimizer),
        "place": place(),
        "digest": digest(sorted(hashes(local(p).detach().flatten()[None]) for p in parameters)),
        "losses": losses[:],
        "dropout": drops(modules),
        "batch_norm": any(isinstance(m, _BatchNorm) and m.training for m in modules),
        "scales": scaler is not None,
        "stateful": any(torch.is_tensor(value) and value.ndim > 0 for value in state),
        "waits": sorted(waits),
    }
    for noted in (losses, waits):
        noted.clear()
    scaler = None
    return more.items()


def note_item(tensor):
    if tensor.requires_grad and not is_library(sys._getframe(1)):
        waits.add(place())
    return original["item"](tensor)


def note_output(stream):
    """Notes numbers that the script prints."""
    write_text = stream.write

    def write_and_note(text):
        if numbers := NUMBER.findall(text):
            write(printed=numbers, form=re.sub(r"[-\d.]+", "#", text), place=place())
        return write_text(text)

    stream.write = write_and_note


def note_scale(self, outputs):
    global scaler
    if self.is_enabled():
        scaler = self
    return original["scale"](self, outputs)


def note_clipping(name):
    clip = getattr(torch.nn.utils, name)

    @functools.wraps(clip)
    def noted(*args, **options):
        stages = scaler._per_optimizer_states.values() if scaler else []
        if scaler and scaler.get_scale() != 1 and all(s["stage"].name == "READY" for s in stages):
            write(clips_scaled=True, place=place())
        return clip(*args, **options)

    setattr(torch.nn.utils, name, noted)


def note_checkpoint(name, storage):
    """Notes what torch.distributed.checkpoint saves and loads: folders."""
    call = getattr(checkpoint, name)

    @functools.wraps(call)
    def noted(state_dict, **options):
        path = options.get("checkpoint_id") or getattr(options.get(storage), "path", "")
        if not is_library(sys._getframe(1)):
            if name == "load":
                write(loaded_to="a folder", place=place())
            else:
                witness.note_save(path, folder=True)
        return call(state_dict, **options)

    setattr(checkpoint, name, noted)


def note_fsync(fd):
    synced.add(os.fstat(fd if isinstance(fd, int) else fd.fileno()).st_ino)
    return original["fsync"](fd)


def note_rename(name):
    rename = getattr(os, name)

    def noted(src, dst, **options):
        if not is_library(sys._getframe(1)):
            path, target = os.path.abspath(src), os.path.abspath(dst)
            on_disk = os.path.exists(path) and os.stat(path).st_ino in synced
            write(renamed=path, to=target, synced=on_disk, place=place())
        return rename(src, dst, **options)

    setattr(os, name, noted)


def install():
    witness_batches.install()
    torch.optim.Optimizer.add_param_group, torch.Tensor.item = follow, note_item
    DistributedDataParallel.__init__ = note_wrapper
    torch.autograd.backward, torch.amp.GradScaler.scale = note_backward, note_scale
    os.fsync = note_fsync
    for stream in (sys.stdout, sys.stderr):
        note_output(stream)
    for name in ("rename", "replace"):
        note_rename(name)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        note_clipping(name)
    for name in ("save", "async_save", "load"):
        note_checkpoint(name, "storage_reader" if name == "load" else "storage_writer")
    register_module_forward_pre_hook(note_evaluation)
    witness.details.append(describe)
