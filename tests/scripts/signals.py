"""Sends every rank, or the one named, the signal SIGNAL at SIGNAL_AT.

That is an epoch, and samples of it, or "evaluation". As from torchrun, it reaches a rank's data
workers, too. The ranks ask after every tenth step whether to stop, however long the steps take.
"""

import os

import torch
from patched import after, before, script
from torch import nn

if hasattr(script.Trainer, "_any_rank_stops"):

    @after(script.Trainer, "__init__")
    def ask_at_the_tenth_step(self, *args):
        self.next_check = 10

    @after(script.Trainer, "_any_rank_stops")
    def ask_ten_steps_later(self):
        self.next_check = self.steps + 10 - self.steps % 10


def signal_at(position):
    if os.environ.get("SIGNAL_AT") == position:
        if os.environ["RANK"] == os.environ.get("SIGNAL_RANK", os.environ["RANK"]):
            os.killpg(os.getpid(), int(os.environ["SIGNAL"]))


@before(script.Trainer, "_run_batch")
def signal_in_training(self, inputs, targets):
    signal_at(f"{self.epochs_run} {self.samples_run}")


def signal_in_evaluation(module, inputs, outputs):
    if not torch.is_grad_enabled():
        signal_at("evaluation")


nn.modules.module.register_module_forward_hook(signal_in_evaluation)
