"""Notes what is asked of steps, too: gradients, losses, waits, evaluations.

Of a gradient, its product with a fixed vector is kept: that of a mean is the mean of the products.
"""

import functools
import logging
import os
import re
import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.fsdp import FSDPModule
from torch.distributed.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from rankcheck import witness
from rankcheck.witness import batches as witness_batches
from rankcheck.witness import (
    caller,
    hashes,
    held,
    is_library,
    local,
    observe,
    place,
    state,
    tensors_of,
    write,
)
from rankcheck.witness.batches import digest

PATTERN = torch.cos(torch.arange(4096, dtype=torch.float64))
MAX_GRADIENTS = 40  # whose products are written down, of each step
HALVES = (torch.bfloat16, torch.float16)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")
WORD = re.compile(r"[^\W\d_]+")
LINE_END = re.compile(r"[\r\n]")
WAITS = ("item", "__bool__", "__float__", "__format__", "cpu", "tolist")  # for what a GPU computes
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce")
COLLECTIVES += ("all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "scatter")
COLLECTIVES += ("reduce_scatter", "reduce_scatter_tensor", "send", "recv", "isend", "irecv")
COLLECTIVES += ("batch_isend_irecv", "barrier", "gather_object", "broadcast_object_list")
FUNCTIONAL = ("all_gather", "all_gather_tensor", "all_reduce", "broadcast", "gather", "reduce")
PASSES_ON = ("ToCopyBackward0", "MulBackward0")
SAME_SIZE = ("all_reduce", "broadcast", "reduce")


def product(tensor):
    flat = local(tensor).detach().to_dense().flatten()[: len(PATTERN)]
    return float(flat.double() @ PATTERN[: len(flat)])


def averages():
    """Whether DDP averages the gradients of the backward pass that runs now.

    It has decided so in its forward, which is what no_sync must contain.
    """
    wrappers = [root for root in state.roots if isinstance(root, DistributedDataParallel)]
    return any(wrapper.require_forward_param_sync for wrapper in wrappers)


def follow(result, optimizer, group):
    """Adds up the gradients of an optimizer's parameters, as they are before the ranks' mean."""

    def add(key, gradient):
        state.products[key] = state.products.get(key, 0.0) + product(gradient)
        state.last_syncs = averages()
        if state.last_syncs:  # a part that is computed again has its gradient twice in a pass
            state.syncs.setdefault(key, set()).add(state.passes)

    if optimizer not in state.optimizers:
        state.optimizers.append(optimizer)
    for parameter in optimizer.param_groups[-1]["params"]:
        is_new = state.followed.get(id(parameter)) is not parameter  # to any optimizer
        if is_new and parameter.requires_grad and not hasattr(parameter, "to_local"):
            state.followed[id(parameter)] = parameter
            parameter.register_hook(held("steps", functools.partial(add, id(parameter))))


def note_wrapper(ddp, module, *args, **options):
    if not witness.of_all_ranks(**options):
        return  # other ranks have other parts of the model
    searches = options.get("find_unused_parameters", False)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = module.named_parameters()
    state.wrapped.update(
        (id(parameter), searches) for name, parameter in named if name not in ignored
    )


def drops(modules):
    return any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in modules)


def normalizes(modules):
    return any(isinstance(m, _BatchNorm) and m.training for m in modules)


def note_call(module, inputs):
    """Notes 16 bits, gradients that nobody clears, and models that are called to evaluate."""
    state.half |= torch.is_autocast_enabled("cpu")
    if state.called is None and module not in state.inner and module not in state.roots:
        own = [*module.parameters()]
        state.others |= bool(own) and not any(id(p) in state.followed for p in own)
    if torch.is_grad_enabled():
        if module is state.called:
            state.random_state = digest(torch.get_rng_state().tolist())
        if module is state.called and not state.samples and state.steps:
            note_stale(module)
        return
    models = [model for root in state.roots for model in (root, getattr(root, "module", None))]
    state.evaluates |= module in models
    if module in models and module not in state.evaluated:
        state.evaluated.add(module)
        modules = [*module.modules()]
        is_ddp = isinstance(module, DistributedDataParallel)
        write(
            broadcasts=is_ddp and module.will_sync_module_buffers(),
            drops=drops(modules),
            normalizes=normalizes(modules),
            place=place(),
        )


def note_stale(module):
    """Notes gradients that a step has left over, of parameters that no optimizer here has."""
    used = {id(p) for o in state.optimizers for group in o.param_groups for p in group["params"]}
    stale = [p for p in module.parameters() if p.grad is not None and id(p) not in used]
    if stale and not state.stale_noted:
        state.stale_noted = True
        write(stale=len(stale), place=place())


def is_mean(loss):
    """Whether a loss is a mean that nothing divides, but for the scaler's factor."""
    node = loss.grad_fn
    while node and type(node).__name__ in PASSES_ON[: 1 + bool(state.scaler)]:
        node = node.next_functions[0][0]
    is_reduced = getattr(node, "_saved_reduction", 0) == 1  # torch's number of "mean"
    return is_reduced or type(node).__name__.startswith("MeanBackward")


def note_backward(tensors, *args, **options):
    state.passes += 1
    state.evaluates = False
    state.means.append(place() if torch.is_tensor(tensors) and is_mean(tensors) else "")
    is_loss = torch.is_tensor(tensors) and tensors.numel() == 1
    loss = float(local(tensors).detach()) if is_loss else None
    state.losses.append([loss, len(state.samples)])


def note_samples(result, *args, **options):
    state.losses[-1][1] = len(state.samples) - state.losses[-1][1]


def note_cleared(owner, *args, **options):
    """Notes gradients that are cleared before a step has used them.

    An optimizer of one's own may use them in other methods.
    """
    is_torchs = all(type(o).__module__.startswith("torch.") for o in state.optimizers)
    if len(state.optimizers) == 1 and is_torchs and state.samples and not state.in_closure:
        write(thrown=len(state.samples), place=place())
        forget()


def note_skipped(result, *args, **options):
    """A step that the scaler skips has used its gradients: they are infinite."""
    if state.samples:
        forget()


def forget():
    for noted in (state.samples, state.products, state.syncs):
        noted.clear()


def shard(parameter):
    """Returns which part of a parameter this rank holds: ranks with equal ones hold the same."""
    if not hasattr(parameter, "to_local"):
        return None
    mesh = parameter.device_mesh
    places = zip(parameter.placements, mesh.get_coordinate() or [], strict=False)
    return mesh.mesh.tolist(), [c if p.is_shard() else None for p, c in places]


def describe_gradients(parameters):
    trained = [p for p in parameters if p.requires_grad]
    all_used = all(id(p) in state.products for p in trained)
    own = [state.products.pop(id(p), None) for p in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    return {
        "own": own[:MAX_GRADIENTS],
        "used": [None if p.grad is None else product(p.grad) for p in parameters[:MAX_GRADIENTS]],
        "has_gradient": any(value is not None for value in own),
        "largest": max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0),
        "ddp": all(id(p) in state.wrapped for p in trained),
        "syncs": max((len(state.syncs.pop(id(p), ())) for p in parameters), default=0),
        "last_syncs": state.last_syncs,
        "searches": all_used and any(state.wrapped.get(id(p)) for p in trained),
    }


def is_data_parallel(parameter):
    """Whether all ranks take batches of their own: as FSDP shards it, or HSDP, without TP."""
    placements = getattr(parameter, "placements", ())
    shards = sum(placement.is_shard() for placement in placements)
    others = sum(placement.is_replicate() for placement in placements)
    whole = dist.get_world_size() if dist.is_initialized() else 1
    return shards == 1 == len(placements) - others and parameter.device_mesh.size() == whole


def is_lone_root(modules):
    """Whether fully_shard has got one module alone, of which blocks are a part."""
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    blocks = [m for m in modules if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    return len(sharded) == 1 and any(block in set(sharded[0].modules()) for block in blocks)


def describe_shards(parameters, modules):
    return {
        "sharded": any(hasattr(p, "to_local") for p in parameters),
        "shard": digest([shard(p) for p in parameters]),
        "shapes": digest([list(p.shape) for p in parameters]),
        "whole": sum(p.numel() for p in parameters),
        "lone_root": is_lone_root(modules),
        "fsdp": any(isinstance(module, FSDPModule) for module in modules)
        and all(map(is_data_parallel, parameters)),
    }


def digest_of(tensors):
    return digest(sorted(hashes(local(t).detach().flatten()[None]) for t in tensors))


def describe_state(optimizer):
    """Describes what an optimizer keeps; ZeroRedundancyOptimizer keeps it in one of its own."""
    states = [optimizer.state, getattr(getattr(optimizer, "optim", None), "state", {})]
    tensors = tensors_of([dict(s) for s in states])
    return {
        "stateful": any(t.ndim > 0 for t in tensors),
        "state": digest_of(tensors),
        "rates": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        "scheduled": sorted(
            s.last_epoch for s in state.schedules if getattr(s, "optimizer", None) is optimizer
        ),
    }


def describe(optimizer, parameters):
    """Returns what the event of a step has, too."""
    modules = {module for root in state.roots for module in root.modules()}
    of_models = [p for module in modules for p in module.parameters(recurse=False)]
    called = {*map(id, of_models)}
    untrained = witness.sum_of([p for p in of_models if id(p) not in state.followed])
    state.untrained = untrained if state.untrained is None else state.untrained
    own = digest_of(parameters)
    rounded = [[local(p).detach().to(kind) for p in parameters] for kind in HALVES]
    more = describe_gradients(parameters) | describe_shards(parameters, modules)
    more |= describe_state(optimizer)
    more |= {
        "optimizer": id(optimizer),
        "place": place(),
        "digest": own,
        "rounded": [digest_of(tensors) for tensors in rounded],
        "called": own if called == {*map(id, parameters)} else digest_of(of_models),
        "foreign": not called.intersection(map(id, parameters)),
        "losses": state.losses[:],
        "means": state.means[:],
        "half": state.half or any(local(p).itemsize < 4 for p in parameters),
        "dropout": drops(modules),
        "drops_with": state.random_state,
        "talks": bool(state.talks),
        "batch_norm": normalizes(modules),
        "others": state.others or untrained != state.untrained,
        "eval_place": state.eval_place,
        "scale": state.scaler.get_scale() if state.scaler else None,
        "float16": state.float16,
        "waits": sorted(state.waits),
    }
    for noted in (state.losses, state.means, state.waits, state.talks):
        noted.clear()
    state.scaler, state.half = None, False
    return more.items()


def note_collective(name, *args, **options):
    """Notes a call; of those whose tensors have one size on all ranks, with the size."""
    if line := caller():
        state.meetings += 1
        if name != "barrier":
            state.talks.add(line)
        tensors = tensors_of((args, options))[:1] if name in SAME_SIZE else []
        sizes = [f" of {list(tensor.shape)}" for tensor in tensors]
        groups = [v for v in (*args, *options.values()) if isinstance(v, dist.ProcessGroup)]
        of_all = all(group is dist.GroupMember.WORLD for group in groups)
        write(call=name + "".join(sizes), of_all=of_all, place=line)


def note_eval(module):
    if torch.is_grad_enabled() and (line := caller()):
        state.eval_place = line


def note_wait(tensor, *args, **options):
    by_script = state.depth == 1 and caller()
    if by_script and tensor.numel() < 64 and state.is_on_gpu(tensor):
        state.waits.add(by_script)


def note_synchronizing(*args, **options):
    if line := caller():
        state.waits.add(line)


def note_numbers(numbers, labels):
    """Notes numbers that the script logs, with the line that has called the one that does."""
    frame, lines = sys._getframe(1), []
    while frame:
        if not is_library(frame):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    place, called_in, *_ = [*lines, "", ""]
    more = {"place": place, "called_in": called_in, "evaluated": state.evaluates}
    write(printed=numbers, labels=labels, **more)


def note_text(text):
    """Notes the numbers of a text, each with the word before it: print() writes part by part."""
    text = state.line + text
    found = [*NUMBER.finditer(text, len(state.line))]
    state.line = LINE_END.split(text)[-1][-200:]
    before = [LINE_END.split(text[: match.start()])[-1] for match in found]
    words = [WORD.findall(line.replace("tensor(", "")) for line in before]
    if found:
        note_numbers([match[0] for match in found], [word[-1] if word else "" for word in words])


def note_scalars(values):
    """Notes named numbers, but none of a DTensor: its value may be a collective."""
    kinds = (float, torch.Tensor)
    one = {k: v for k, v in values.items() if type(v) in kinds and torch.as_tensor(v).numel() == 1}
    if one:
        note_numbers([repr(float(v)) for v in one.values()], [*map(str, one)])


def note_record(handler, record):
    """Notes what a logger writes into a file: the terminal is a stream."""
    if isinstance(handler, logging.FileHandler):
        note_text(f"{record.getMessage()}\n")


def note_scalar(writer, tag, value, *args, **options):
    note_scalars({tag: value})


def note_metrics(*args, **options):
    for value in [*args, *options.values()]:
        note_scalars(value if isinstance(value, dict) else {})


def note_run(*args, group=None, mode=None, **options):
    mode = mode or os.environ.get("WANDB_MODE")
    if dist.is_initialized() and group is None and mode != "disabled":
        write(tracks="Weights & Biases", place=place())


def note_writer(writer, log_dir=None, *args, **options):
    if dist.is_initialized():
        folder = f", in {log_dir}" if log_dir else ""
        write(tracks=f"TensorBoard{folder}", place=place())


def follow_runs(module):
    """Notes each run that is started of Weights & Biases, or of TensorBoard."""
    if hasattr(module, "SummaryWriter"):
        observe("prints", module.SummaryWriter, "__init__", before=note_writer)
    else:
        observe("prints", module, "init", before=note_run)


def follow_trackers():
    """Notes what TensorBoard and the like are told: the script has imported them by now."""
    if state.steps:
        return
    for name in ("torch.utils.tensorboard.writer", "tensorboardX.writer"):
        if name in sys.modules:
            observe("prints", sys.modules[name].SummaryWriter, "add_scalar", before=note_scalar)
    trackers = [sys.modules.get("wandb"), getattr(sys.modules.get("accelerate"), "Accelerator", 0)]
    for tracker in trackers:
        if hasattr(tracker, "log"):
            observe("prints", tracker, "log", before=note_metrics)


def note_scale(self, outputs):
    if self.is_enabled():
        state.scaler = self


def note_autocast(self, device_type, dtype=None, enabled=True, *args, **options):
    by_default = dtype is None and device_type == "cuda"
    if enabled and torch.is_grad_enabled() and (by_default or dtype is torch.float16):
        state.float16 = state.float16 or place()


def note_clipping(*args, **options):
    stages = state.scaler._per_optimizer_states.values() if state.scaler else []
    if (
        state.scaler
        and state.scaler.get_scale() != 1
        and all(s["stage"].name == "READY" for s in stages)
    ):
        write(clips_scaled=True, place=place())


def install():
    witness_batches.install()
    observe("steps", torch.optim.Optimizer, "add_param_group", after=follow)
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        observe("steps", owner, "zero_grad", before=note_cleared)
    observe("steps", DistributedDataParallel, "__init__", before=note_wrapper)
    observe("steps", torch.autograd, "backward", before=note_backward, after=note_samples)
    observe("steps", torch.amp.GradScaler, "scale", before=note_scale)
    observe("steps", torch.amp.GradScaler, "step", after=note_skipped)
    observe("costs", torch.autocast, "__init__", before=note_autocast)
    observe("saves", LRScheduler, "__init__", before=lambda s, *a, **o: state.schedules.add(s))
    for name in COLLECTIVES:
        observe("steps", dist, name, before=functools.partial(note_collective, name))
    for owner in (functional, dist.nn, _functional_collectives):
        for name in filter(vars(owner).get, FUNCTIONAL):
            observe("steps", owner, name, before=functools.partial(note_collective, name))
    observe("steps", torch.nn.Module, "eval", before=note_eval)
    for name in WAITS:
        observe("costs", torch.Tensor, name, before=note_wait)
    for name in ("synchronize", "empty_cache"):
        observe("costs", torch.cuda, name, before=note_synchronizing)
    for stream in (sys.stdout, sys.stderr):
        observe("prints", stream, "write", before=note_text)
    observe("prints", logging.StreamHandler, "emit", before=note_record)
    state.after_step.append(held("prints", follow_trackers))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        observe("costs", torch.nn.utils, name, before=note_clipping)
    register_module_forward_pre_hook(held("steps", note_call))
    state.details.append(describe)
