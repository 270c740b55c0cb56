"""Each rank writes what it has trained in the end: the weights of all optimizers."""

import os

import torch
from patched import after, script
from torch.optim.optimizer import register_optimizer_step_post_hook

optimizers = {}


@register_optimizer_step_post_hook
def note_optimizer(optimizer, args, options):
    optimizers[id(optimizer)] = optimizer


@after(script, "main")
def write_weights(args):
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    weights = [parameter.detach() for group in groups for parameter in group["params"]]
    torch.save(weights, f"rank{os.environ.get('RANK', '')}.weights")
