"""Keeps the batches of all ranks' step AUDIT_KEEP, or takes those that are kept in AUDIT_REPLAY.

There, one process begins with the weights of that step, and gets each batch of all ranks as one.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_map

from rankcheck import witness
from rankcheck.witness import state
from rankcheck.witness.batches import random_states

# What drops units, or normalizes over the batch.
BY_BATCH = (_DropoutNd, _BatchNorm, nn.MultiheadAttention, nn.RNNBase)
CANNOT_JOIN = "the ranks' batches cannot be joined"
batches = []  # that have come since the last step
is_ahead = bool  # says whether the last of them is for the next step
states = None  # of the random numbers when the last one came
joined = None  # those to come, where they are taken


def keep_batch(batch):
    global states
    if torch.is_grad_enabled():  # else it evaluates
        batches.append(batch)
        states = random_states()
    return batch


def has_drawn():
    """Whether random numbers were drawn since the last batch came, or since torch had a seed."""
    states_now = random_states()
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    if torch.equal(fresh.get_state(), torch.get_rng_state()):
        states_now["torch"] = states["torch"]
    return states_now != states


def weights():
    groups = [group for o in state.optimizers for group in o.param_groups]
    parameters = {id(p): p for group in groups for p in group["params"]}  # some are in several
    return [witness.local(p).detach() for p in parameters.values()]


def describe(optimizer, parameters):
    """Says whether the step is random; before each, the batches of the last one are forgotten."""
    used = batches[:-1] if is_ahead() else batches[:]
    if str(state.steps) == os.environ["AUDIT_KEEP"]:
        kept = {"batches": used, "weights": weights()}
        witness.original["save"](kept, witness.folder() / f"{witness.get_rank()}.kept")
    del batches[: len(used)]
    return [("random", states is not None and has_drawn())]


def join(*leaves):
    if torch.is_tensor(leaves[0]) and leaves[0].ndim:
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError(CANNOT_JOIN)
        return torch.cat(leaves)
    if is_texts(leaves[0]):
        return [text for texts in leaves for text in texts]
    if any(leaf != leaves[0] for leaf in leaves):
        raise ValueError(CANNOT_JOIN)
    return leaves[0]


def is_texts(value):
    """Whether a part of a batch has a text for each sample."""
    return isinstance(value, list | tuple) and bool(value) and type(value[0]) is str


def take_joined(batch):
    global joined
    if not torch.is_grad_enabled():
        return batch
    if joined is None:
        files = sorted(Path(os.environ["AUDIT_REPLAY"]).glob("*.kept"), key=lambda f: int(f.stem))
        load = witness.original["load"]
        ranks = [load(file, "cpu", weights_only=False) for file in files]
        batches_of_all = zip(*(rank["batches"] for rank in ranks), strict=True)
        joined = [tree_map(join, *parts, is_leaf=is_texts) for parts in batches_of_all]
        for parameter, value in zip(weights(), ranks[0]["weights"], strict=True):
            parameter.copy_(value)
    return joined.pop(0) if joined else batch


def calm(module, inputs):
    """Lets a module do the same with each sample, whatever else is in the batch."""
    if isinstance(module, BY_BATCH):
        module.eval()


def install():
    if "AUDIT_CALM" in os.environ:
        register_module_forward_pre_hook(calm)
    if "AUDIT_REPLAY" in os.environ:
        state.change.append(take_joined)
    state.change.append(keep_batch)
    state.details.append(describe)
