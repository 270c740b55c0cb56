"""Notes the batches that DataLoaders yield, and what random numbers their data sets draw."""

import hashlib
import random

import numpy
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, dataloader
from torch.utils.data._utils import fetch

from rankcheck import witness
from rankcheck.witness import hashes, held, observe, place, state, write


def digest(*parts):
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def random_states(dataset=None):
    """Returns a digest of the state of each library's random numbers, and of a data set's own."""
    states = {
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
        "random": digest(random.getstate()),
        "numpy": digest(numpy.random.get_state()[1].tobytes(), numpy.random.get_state()[2]),
    }
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, numpy.random.Generator):
            states[f"self.{name}"] = digest(value.bit_generator.state)
        elif isinstance(value, torch.Generator):
            states[f"self.{name}"] = digest(value.get_state().tolist())
        elif isinstance(value, random.Random):
            states[f"self.{name}"] = digest(value.getstate())
    return states


def follow_batches(note):
    """Lets `note` pass on each batch, with its iterator and indices; at the end it gets None."""
    iterator = dataloader._BaseDataLoaderIter
    next_index, next_batch = iterator._next_index, iterator.__next__

    def note_index(self):
        self.asked = getattr(self, "asked", [])  # of batches that are loaded, or soon will be
        self.asked.append(next_index(self))
        return self.asked[-1]

    def note_batch(self):
        try:
            batch = next_batch(self)
        except StopIteration:
            note(self, None, [])
            raise
        asked = self.asked.pop(0) if getattr(self, "asked", None) else []
        return note(self, batch, asked if isinstance(asked, list | tuple) else [asked])

    iterator._next_index, iterator.__next__ = note_index, note_batch


def pass_on(iterator, batch, asked):
    """Notes a batch and returns it, or what is to come in its place."""
    for function in state.change if batch is not None else ():
        batch = function(batch)
    held("data", note_batch)(iterator, batch, asked)
    return batch


def note_batch(iterator, batch, asked):
    if batch is None:
        return note_end(iterator)
    if not getattr(iterator, "begun", False):
        iterator.begun, iterator.trains = True, False
        evaluates = not torch.is_grad_enabled()
        write(iterator=id(iterator), place=place(), evaluates=evaluates, **description(iterator))
    state.batch_of = iterator
    indices = [None if index is None else str(index) for index in asked]
    if torch.is_grad_enabled():
        state.indices += indices
    write(iterator=id(iterator), indices=indices, hashed=hashes(*witness.rows(batch)))
    if iterator._num_yielded == length_of(iterator):  # Lightning then asks for no more
        note_end(iterator)


def note_end(iterator):
    iterator.begun = False  # persistent workers: the same iterator begins anew
    write(iterator=id(iterator), ended=True)


def length_of(iterator):
    """Returns how many batches an iterator yields, or None if that is unknown."""
    try:
        return len(iterator)
    except TypeError:
        return None


def description(iterator):
    dataset, sampler = iterator._dataset, iterator._index_sampler
    size = getattr(sampler, "batch_size", None)
    sampler = getattr(sampler, "sampler", sampler)  # that of a BatchSampler
    shuffle = getattr(sampler, "shuffle", None)  # of a DistributedSampler
    shares = getattr(sampler, "num_replicas", None)
    plain = type(sampler) in (RandomSampler, SequentialSampler)  # whose indices count from 0
    known = plain or shuffle is not None
    alone = known and iterator._num_workers == 0  # workers may open files
    return {
        "hash": hash("a set's order"),
        "size": len(dataset) if hasattr(dataset, "__len__") else 0,
        "dropped": len(sampler) % size if known and size and iterator._drop_last else 0,
        "shuffle": shuffle,
        "shares": shares,
        "own_order": getattr(iterator, "own_order", False)
        or (shuffle and is_own(sampler, DistributedSampler)),
        **(look_into(dataset) if alone else {"inputs": "", "targets": ""}),
    }


def is_own(iterable, base):
    """Whether the script itself says in which order this yields."""
    iterate = type(iterable).__iter__
    is_of_script = not witness.is_library_file(iterate.__code__.co_filename)
    return is_of_script and iterate is not base.__iter__


def note_loader(iterator, loader):
    iterator.own_order = is_own(loader, dataloader.DataLoader)


def look_into(dataset):
    """Returns what tells the inputs of some samples, and their targets, from others.

    The inputs are the leaves up to the first by which these samples differ. It is "" if they are
    always other ones. The script's random numbers stay as they were: a random augmentation here
    takes others.
    """
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    found = []
    for _ in range(2):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        indices = range(0, len(dataset), max(1, len(dataset) // 8))
        samples = [list(map(content, tree_leaves(dataset[index]))) for index in indices]
        lengths = range(1, max(map(len, samples), default=1) + 1)
        distinct = (n for n in lengths if len({str(x[:n]) for x in samples}) == len(samples))
        end = next(distinct, 1)
        found.append((digest([x[:end] for x in samples]), digest([x[end:] for x in samples])))
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    inputs, targets = found[0] if found[0] == found[1] else ("", "")
    return {"inputs": inputs, "targets": targets}


def content(leaf):
    """Returns what tells a leaf of a sample from others, on any rank."""
    if torch.is_tensor(leaf):
        return hashes(leaf.flatten()[None])
    if hasattr(leaf, "tobytes"):  # such as an array, or an image
        return digest(leaf.tobytes())
    return leaf if isinstance(leaf, str | bytes | int | float) else type(leaf).__name__


def note_training():
    """Notes that what came last from a DataLoader is trained with: others are for validation."""
    if state.batch_of is not None and not state.batch_of.trains:
        state.batch_of.trains = True
        write(iterator=id(state.batch_of), trains=True)


def follow_random_numbers(fetcher):
    """Notes, also in a data worker, with which random numbers a data set makes a batch."""
    before = {}

    def note_before(self, indices):
        state.seeded.clear()
        before.clear()
        before.update(random_states(self.dataset))

    def note_after(batch, self, indices):
        after = random_states(self.dataset)
        known = [name for name in after if name in before and name not in state.seeded]
        drawn = [name for name in known if before[name] != after[name]]
        with witness.original["open"](
            witness.folder() / f"{witness.get_rank()}.drawn", "a"
        ) as file:
            file.write("".join(f"{name} {before[name]}\n" for name in drawn))

    observe("data", fetcher, "fetch", before=note_before, after=note_after)


def install():
    state.after_backward.append(note_training)
    observe("data", dataloader._BaseDataLoaderIter, "__init__", before=note_loader)
    follow_batches(pass_on)
    for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        follow_random_numbers(fetcher)
    for name, library, seed in (
        ("torch", torch, "manual_seed"),
        ("random", random, "seed"),
        ("numpy", numpy.random, "seed"),
    ):
        observe("data", library, seed, before=lambda *seeds, name=name: state.seeded.add(name))
