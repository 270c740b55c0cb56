"""The first parameter is in no forward pass."""

import functools

import torch
from patched import script
from torch import nn


class PartlyUsedModel(script.ToyModel):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


script.ToyModel = PartlyUsedModel
nn.parallel.DistributedDataParallel = functools.partial(
    nn.parallel.DistributedDataParallel, find_unused_parameters=True
)
