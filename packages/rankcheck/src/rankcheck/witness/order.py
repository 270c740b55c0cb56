"""Notes in which order a process has the parameters and buffers of its models and optimizers.

All ranks must have the same: DDP broadcasts tensors, and an optimizer loads its state, by position.
"""

import weakref

import torch
from torch.nn.modules import module as hooks
from torch.nn.parallel import DistributedDataParallel

from rankcheck import witness
from rankcheck.witness import observe, place, state, write

registered = weakref.WeakKeyDictionary()  # of each module: where it got what has a name in it
made = weakref.WeakKeyDictionary()  # where an optimizer was made
noted = weakref.WeakSet()


def note_registration(module, name, value):
    registered.setdefault(module, {})[name] = place()


def places(model):
    return {
        f"{prefix}.{name}".strip("."): line
        for prefix, module in model.named_modules()
        for name, line in registered.get(module, {}).items()
    }


def note_model(model, ddp=False):
    if model not in noted:
        noted.add(model)
        kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
        for kind, named in kinds.items():
            tensors = [(name, list(tensor.shape)) for name, tensor in named]
            write(order=kind, tensors=tensors, ddp=ddp, places=places(model), place=place())


def note_wrapped(ddp, module, *args, **options):
    note_model(module, ddp=witness.of_all_ranks(**options))


def note_group(optimizer, group):
    made.setdefault(optimizer, place())


def note_optimizer(optimizer, parameters):
    if optimizer in made and state.roots:
        models = [getattr(root, "module", root) for root in state.roots]
        for model in models:
            note_model(model)
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        tensors = [(names.get(id(p), ""), list(p.shape)) for p in parameters]
        more = {"ddp": False, "places": {}, "place": made.pop(optimizer)}
        write(order="parameter of the optimizer", tensors=tensors, **more)
    return ()


def install():
    observe("steps", torch.optim.Optimizer, "add_param_group", before=note_group)
    observe("steps", DistributedDataParallel, "__init__", before=note_wrapped)
    for kind in ("module", "parameter", "buffer"):
        getattr(hooks, f"register_module_{kind}_registration_hook")(note_registration)
    state.details.append(note_optimizer)
