"""Counts the buckets of gradients that are sent."""

from patched import after, script
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

buckets = []


def count_bucket(group, bucket):
    buckets.append(bucket.index())
    return allreduce_hook(group, bucket)


@after(nn.parallel.DistributedDataParallel, "__init__")
def count_buckets(self, model):
    self.register_comm_hook(None, count_bucket)


after(script, "main")(lambda args: print(len(buckets), "buckets"))
