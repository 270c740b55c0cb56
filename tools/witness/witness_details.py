"""Notes what tools/audit asks for beside tools/witness/witness.py: gradients, batches, collectives.

Of a gradient, its product with a fixed vector is kept, since that of a mean is the products' mean.
"""

import functools
import hashlib
import sys

import torch
import witness
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, dataloader
from witness import hashes, local, place, write

PATTERN = torch.cos(torch.arange(4096, dtype=torch.float64))
MAX_GRADIENTS = 40  # whose products are written down, of each step
add_param_group = torch.optim.Optimizer.add_param_group
products = {}  # of the gradients that this process has computed since the last step, by parameter
backwards = {}  # how often, by parameter
synced = {}  # how often of these times DDP has averaged them
waits = {}  # how often a line of the script has waited for the GPU since the last step
batch_of = None  # the iterator of a DataLoader whose batch came last
library = torch.library.Library("c10d", "IMPL")


def product(tensor):
    flat = local(tensor).detach().to_dense().flatten()[: len(PATTERN)]
    return float(flat.double() @ PATTERN[: len(flat)])


def digest(tensors):
    parts = [hashes(tensor.detach().reshape(1, -1))[0] for tensor in tensors]
    return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()


def models():
    return {module for root in witness.roots for module in root.modules()}


def note_gradient(key, gradient):
    ddp = [model for model in models() if isinstance(model, DistributedDataParallel)]
    products[key] = products.get(key, 0.0) + product(gradient)
    backwards[key] = backwards.get(key, 0) + 1
    synced[key] = synced.get(key, 0) + any(model.require_backward_grad_sync for model in ddp)
    if batch_of and not batch_of.trains:
        batch_of.trains = True
        write(trains=id(batch_of))


def follow(optimizer, group):
    add_param_group(optimizer, group)
    for parameter in optimizer.param_groups[-1]["params"]:
        if parameter.requires_grad and not hasattr(parameter, "to_local"):
            parameter.register_hook(functools.partial(note_gradient, id(parameter)))


def describe(optimizer, parameters):
    """Returns what the event of a step has, too."""
    keys = [id(p) for p in parameters]
    own, counts, averaged = ([d.pop(k, None) for k in keys] for d in (products, backwards, synced))
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    state = tree_leaves([list(values.values()) for values in optimizer.state.values()])
    more = {
        "optimizer": id(optimizer),
        "place": place(),
        "digest": digest(map(local, parameters)),
        "sharded": any(hasattr(p, "to_local") for p in parameters),
        "own": own[:MAX_GRADIENTS],
        "used": [None if p.grad is None else product(p.grad) for p in parameters[:MAX_GRADIENTS]],
        "largest": max((float(g.abs().max()) for g in gradients if g.numel()), default=None),
        "backwards": max(filter(None, counts), default=0),
        "synced": max(filter(None, averaged), default=0),
        "ddp": any(isinstance(model, DistributedDataParallel) for model in models()),
        "dropout": any(isinstance(m, _DropoutNd) and m.p > 0 and m.training for m in models()),
        "stateful": any(torch.is_tensor(value) and value.ndim > 0 for value in state),
        "waits": dict(waits),
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
            write(ends=id(self))
            raise
        batch_of = self
        indices = self.asked.pop(0) if getattr(self, "asked", None) else []
        hashed = hashes(*witness.rows(batch))
        write(batch_of=id(self), indices=indices, hashed=hashed)
        return batch

    iterator._next_index, iterator.__next__ = note_index, note_batch


def description(iterator):
    dataset, sampler = iterator._dataset, iterator._index_sampler
    sampler = getattr(sampler, "sampler", sampler)  # that of a BatchSampler
    return {
        "size": len(dataset) if hasattr(dataset, "__len__") else None,
        "sampler": type(sampler).__name__,
        "shuffle": getattr(sampler, "shuffle", None),
        "split": digest([torch.tensor(dataset.indices)]) if isinstance(dataset, Subset) else "",
    }


def note_collectives():
    """Notes each operation of torch.distributed, whoever calls it, as tools/watch does."""
    for name in torch._C._dispatch_get_all_op_names():
        operation = name.removeprefix("c10d::")
        if operation != name and "process_group" in str(
            (call := getattr(torch.ops.c10d, operation).default)._schema
        ):
            noted = functools.partial(note_collective, operation, call)
            library.impl(operation, noted, "BackendSelect", with_keyset=True)


def note_collective(operation, call, keys, *arguments):
    sizes = [t.numel() for t in tree_leaves(arguments[:2]) if torch.is_tensor(t)]
    write(collective=operation, size=sum(sizes), place=place())
    return call.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), *arguments)


def note_waits(name):
    call = getattr(torch.Tensor, name)

    def noted(tensor, *arguments):
        if not witness.is_library(sys._getframe(1)):
            waits[place()] = waits.get(place(), 0) + 1
        return call(tensor, *arguments)

    setattr(torch.Tensor, name, noted)


def install():
    torch.optim.Optimizer.add_param_group = follow
    witness.details.append(describe)
    note_batches()
    note_collectives()
    for name in ("item", "tolist", "__float__"):
        note_waits(name)
