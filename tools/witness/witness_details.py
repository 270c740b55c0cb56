"""Notes what tools/audit asks for beside witness.py: gradients, and the batches of DataLoaders.

Of a gradient, its product with a fixed vector is kept: that of a mean is the mean of the products.
"""

import functools
import hashlib
import random
import sys

import numpy
import torch
import torch.distributed as dist
import witness
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import dataloader
from witness import hashes, local, place, write

PATTERN = torch.cos(torch.arange(4096, dtype=torch.float64))
MAX_GRADIENTS = 40  # whose products are written down, of each step
wrap = DistributedDataParallel.__init__
add_param_group, item = torch.optim.Optimizer.add_param_group, torch.Tensor.item
wrapped = set()  # the parameters that DDP should average
products = {}  # of the gradients that this process has computed since the last step, by parameter
waits = set()  # the lines that have called item() of a loss since the last step
batch_of = None  # the iterator of a DataLoader whose batch came last


def product(tensor):
    flat = local(tensor).detach().to_dense().flatten()[: len(PATTERN)]
    return float(flat.double() @ PATTERN[: len(flat)])


def digest(tensors):
    parts = [hashes(tensor.detach().flatten()[None])[0] for tensor in tensors]
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()


def follow(optimizer, group):
    """Adds up the gradients of an optimizer's parameters, as they are before the ranks' mean."""

    def add(key, gradient):
        products[key] = products.get(key, 0.0) + product(gradient)

    add_param_group(optimizer, group)
    for parameter in optimizer.param_groups[-1]["params"]:
        if parameter.requires_grad and not hasattr(parameter, "to_local"):
            parameter.register_hook(functools.partial(add, id(parameter)))


@functools.wraps(wrap)
def note_wrapper(ddp, module, *args, **options):
    wrapped.update(map(id, module.parameters()))
    wrap(ddp, module, *args, **options)


def describe(optimizer, parameters):
    """Returns what the event of a step has, too."""
    modules = {module for root in witness.roots for module in root.modules()}
    own = [products.pop(id(p), None) for p in parameters]
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    state = tree_leaves([list(values.values()) for values in optimizer.state.values()])
    world = (dist.get_world_size() if dist.is_initialized() else 1,)
    more = {
        "optimizer": id(optimizer),
        "place": place(),
        "digest": digest(map(local, parameters)),
        "own": own[:MAX_GRADIENTS],
        "used": [None if p.grad is None else product(p.grad) for p in parameters[:MAX_GRADIENTS]],
        "has_gradient": any(value is not None for value in own),
        "largest": max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0),
        "sharded": any(hasattr(p, "to_local") for p in parameters),
        "ddp": all(id(p) in wrapped for p in parameters if p.requires_grad),
        "fsdp": any(isinstance(module, FSDPModule) for module in modules)
        and all(hasattr(p, "device_mesh") and p.device_mesh.shape == world for p in parameters),
        "dropout": any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in modules),
        "stateful": any(torch.is_tensor(value) and value.ndim > 0 for value in state),
        "waits": sorted(waits),
    }
    waits.clear()
    return more.items()


def note_batches():
    iterator = dataloader._BaseDataLoaderIter
    next_index, next_batch = iterator._next_index, iterator.__next__

    def note_index(self):
        self.asked = getattr(self, "asked", [])  # of batches that are loaded, or soon will be
        self.asked.append(next_index(self))
        return self.asked[-1]

    def note_batch(self):
        global batch_of
        if not hasattr(self, "trains"):
            self.trains = False
            write(iterator=id(self), place=place(), **description(self))
        try:
            batch = next_batch(self)
        except StopIteration:
            write(iterator=id(self), ended=True)
            raise
        batch_of = self
        asked = self.asked.pop(0) if getattr(self, "asked", None) else []
        asked = asked if isinstance(asked, list | tuple) else [asked]  # without a batch sampler
        indices = [None if index is None else str(index) for index in asked]
        hashed = hashes(*witness.rows(batch))
        write(iterator=id(self), indices=indices, hashed=hashed)
        return batch

    iterator._next_index, iterator.__next__ = note_index, note_batch


def description(iterator):
    dataset, sampler = iterator._dataset, iterator._index_sampler
    sampler = getattr(sampler, "sampler", sampler)  # that of a BatchSampler
    shuffle = getattr(sampler, "shuffle", None)  # of a DistributedSampler
    shares = getattr(sampler, "num_replicas", None)
    alone = shuffle is not None and iterator._num_workers == 0  # else its workers may open files
    return {
        "size": len(dataset) if hasattr(dataset, "__len__") else 0,
        "shuffle": shuffle,
        "shares": shares,
        "sample": first_sample(dataset) if alone else "",
    }


def first_sample(dataset):
    """Returns what tells a data set's first sample from others, or "" if it is always another one.

    The script's random numbers stay as they were: a random augmentation here takes others.
    """
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    found = set()
    for _ in range(2):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        parts = tree_leaves(dataset[0])
        tensors = [part for part in parts if torch.is_tensor(part)]
        found.add(digest(tensors) + repr([part for part in parts if not torch.is_tensor(part)]))
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    return found.pop() if len(found) == 1 else ""


def note_training():
    """Notes that what came last from a DataLoader is trained with: others are for validation."""
    if batch_of is not None and not batch_of.trains:
        batch_of.trains = True
        write(iterator=id(batch_of), trains=True)


def note_item(tensor):
    if tensor.requires_grad and not witness.is_library(sys._getframe(1)):
        waits.add(place())
    return item(tensor)


def install():
    torch.optim.Optimizer.add_param_group, torch.Tensor.item = follow, note_item
    DistributedDataParallel.__init__ = note_wrapper
    witness.details.append(describe)
    witness.after_backward.append(note_training)
    note_batches()
