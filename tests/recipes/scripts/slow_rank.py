"""The forward pass takes 20 ms, that of the slow rank 25 ms: it has 0.8 times the speed.

The wait for most of it leaves the cores to the other ranks: with more ranks than cores, all would
be slow.
"""

import os
import time

import torch
from patched import script


class SlowModel(script.ToyModel):
    def forward(self, inputs):
        ms = 25 if os.environ["RANK"] == os.environ.get("SLOW_RANK") else 20
        end = time.perf_counter() + ms / 1000
        time.sleep(0.95 * ms / 1000)
        while time.perf_counter() < end:
            torch.mm(WEIGHT, WEIGHT)
        return super().forward(inputs)


WEIGHT = torch.ones(30, 30)
script.ToyModel = SlowModel
