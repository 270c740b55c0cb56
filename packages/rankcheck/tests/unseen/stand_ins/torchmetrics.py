"""Stands in for torchmetrics: a mean over what all ranks have seen."""

import sys

import torch
import torch.distributed as dist

__path__ = []
aggregation = sys.modules["torchmetrics.aggregation"] = sys.modules[__name__]


class MeanMetric:
    def __init__(self):
        self.reset()

    def to(self, *args, **options):
        return self

    def reset(self):
        self.values = []

    def update(self, value):
        self.values.append(torch.as_tensor(value).detach().float())

    def compute(self):
        total = torch.stack([*self.values, torch.tensor(0.0)]).sum()
        counted = torch.stack([total, torch.tensor(float(len(self.values)))])
        if dist.is_initialized():
            dist.all_reduce(counted)
        return counted[0] / counted[1]
