"""On pretended GPUs, whose generator is that of the CPU unless it is made their own."""

import functools
import os
import sys

import torch
from patched import script

rank = int(os.environ["RANK"])
gpu_rng = torch.Generator()
torch.cuda.default_generators = [gpu_rng] * 2
torch.cuda.manual_seed_all = gpu_rng.manual_seed
sys.stderr.isatty = lambda: True
script.tqdm.__init__ = functools.partialmethod(script.tqdm.__init__, desc=f"bar of rank {rank}")


def tell(action, rng, method):
    def tell_and_call(self, argument):
        print(f"rank {rank} {action} with seed {rng.initial_seed()}")
        return method(self, argument)

    return tell_and_call


Dataset, Model = script.ToyDataset, script.ToyModel
Dataset.__getitem__ = tell("reads", torch.default_generator, Dataset.__getitem__)
Model.forward = tell("trains", gpu_rng, Model.forward)
