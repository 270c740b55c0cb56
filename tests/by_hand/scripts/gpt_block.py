"""A GPT's block, in many small buckets."""

from types import SimpleNamespace

from patched import script
from torch import nn

from gpt.gpt import Block


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 64)
        self.block = Block(SimpleNamespace(n_head=2, n_embd=16))
        self.last = nn.Linear(64, 5)

    def forward(self, inputs):
        tokens = self.first(inputs).unflatten(1, (4, 16))
        return self.last(self.block(tokens).flatten(1))


script.ToyModel = Model
script.BUCKET_SIZE = 50
