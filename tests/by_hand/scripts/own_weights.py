"""Each rank begins with other weights, so that those of rank 0 must be broadcast."""

import os

import torch
from patched import script


class OwnModel(script.ToyModel):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.01 * int(os.environ.get("RANK", 0))


script.ToyModel = OwnModel
