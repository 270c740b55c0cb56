"""Each rank prints how far its memory has grown, since before the model is built.

In each layer's forward pass, before the first step, between the backward pass and the optimizer's
step, after it.
"""

import sys

import torch
from patched import after, before, script
from torch import nn

WIDTH, LAYERS = 1536, 8


class Layer(nn.Linear):
    def forward(self, inputs):
        print("forward", script.memory("RssAnon:") - script.start)
        return super().forward(inputs)


class Model(nn.Sequential):
    def __init__(self):
        script.start = script.memory("RssAnon:")
        super().__init__(*[Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


class AdamW(torch.optim.AdamW):
    def step(self):
        before = script.memory("RssAnon:")
        super().step()
        after = script.memory("RssAnon:")
        print("held", *[size - script.start for size in (script.built, before, after)])


@before(script.Trainer, "_run_batch")
def measure_built(self, inputs, targets):
    script.built = script.memory("RssAnon:")


@after(script.Trainer, "_run_batch")
def end(self, inputs, targets):
    sys.exit()


@before(script.Bucket, "note_gradient")
def measure_backward(self, parameter):
    print("backward", script.memory("RssAnon:") - script.start)


script.ToyModel = Model
script.ToyDataset = lambda size: [(torch.zeros(WIDTH), torch.zeros(WIDTH))] * size
torch.optim.SGD = lambda parameters, **options: AdamW(parameters)
