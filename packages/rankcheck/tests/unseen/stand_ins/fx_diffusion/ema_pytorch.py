"""Stands in for ema_pytorch: a moving average of a model, with the original's names and warm-up."""

import copy

import torch
from torch import nn


class EMA(nn.Module):
    def __init__(
        self, model, beta=0.9999, update_after_step=100, update_every=10, inv_gamma=1.0, power=2 / 3
    ):
        super().__init__()
        self.online_model = model
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
        self.inv_gamma, self.power = inv_gamma, power
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self):
        step = self.step.item()
        self.step += 1
        if step % self.update_every:
            return
        first = step <= self.update_after_step or not self.initted.item()
        if step > self.update_after_step:
            self.initted.fill_(True)
        epoch = max(step - self.update_after_step, 0)
        decay = (
            0
            if first or epoch <= 0
            else min(1 - (1 + epoch / self.inv_gamma) ** -self.power, self.beta)
        )
        for kept, new in zip(
            self.ema_model.parameters(), self.online_model.parameters(), strict=False
        ):
            kept.lerp_(new, 1 - decay)
        for kept, new in zip(self.ema_model.buffers(), self.online_model.buffers(), strict=False):
            kept.copy_(new)
