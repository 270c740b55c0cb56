"""Sends itself a signal at the n-th event of a kind: FAULT is "kind n signal".

A "1" at its end means rank 1 alone. There are steps, forward passes of modules in evaluations, and
parts of saves.
"""

import os
import time

import torch
from patched import after, before, script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

kind, number, signum, *rank = os.environ.get("FAULT", "none 0 0").split()
counts = {}


def count(name):
    counts[name] = counts.get(name, 0) + 1
    if (name, counts[name]) == (kind, int(number)) and os.environ["RANK"] in (rank or "01"):
        os.kill(os.getpid(), int(signum))


@register_optimizer_step_post_hook
def count_step(optimizer, args, options):
    count("step")


@nn.modules.module.register_module_forward_hook
def count_evaluation(module, inputs, outputs):
    if not torch.is_grad_enabled():
        count("evaluation")


before(script, "save")(lambda state, path: count("save"))
after(script, "save")(lambda state, path: count("saved"))
after(torch, "save")(lambda state, file, **options: count("written"))  # not yet to the disk


@before(script.os, "fsync")
def save_slowly(file):
    time.sleep(0.5 * script.stop_requested)
