"""Saves the initial weights and all batches."""

import torch
from patched import before, script

batches = []


@before(script.Trainer, "_run_batch")
def note(self, inputs, targets):
    if not batches:
        torch.save(self.model.module.state_dict(), "initial")
    batches.append((inputs, targets))
    torch.save(batches, "batches")


@before(script.GPT, "forward")
def check_mode(self, tokens):  # which dropout would depend on
    assert self.training == torch.is_grad_enabled()
