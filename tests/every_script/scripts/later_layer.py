"""A layer that is used from the second epoch on."""

from patched import before, script
from torch import nn


class Block(script.Block):
    def __init__(self, config):
        super().__init__(config)
        self.later = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.later(super().forward(x)) if script.epoch > 0 else super().forward(x)


script.Block = Block
script.epoch = 0


@before(script.Trainer, "_run_epoch")
def note_epoch(self, epoch):
    script.epoch = epoch
