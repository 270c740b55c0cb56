"""The model and the loss of docs/losses.md, which contrast a sample with its target."""

import losses
import torch
from patched import script
from torch import nn


def run_batch(self, inputs, targets):
    self.optimizer.zero_grad()
    loss = losses.clip_loss(*self.model(inputs, targets))
    loss.backward()
    self.optimizer.step()
    self.totals[1] += len(inputs)


torch.set_default_dtype(torch.float64)
script.ToyModel = lambda: losses.ContrastiveModel(nn.Linear(10, 4), nn.Linear(5, 4))
script.Trainer._run_batch = run_batch
