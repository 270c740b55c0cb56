"""A clock by which each step takes so many seconds, of rank 0 and of rank 1."""

import os
import time
import types

from patched import before, script

steps = 0
seconds = float(os.environ["SECONDS"].split()[int(os.environ["RANK"])])
script.time = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: steps * seconds})


@before(script.Trainer, "_run_batch")
def count_step(self, inputs, targets):
    global steps
    steps += 1


@before(script.Trainer, "_any_rank_stops")
def count(self):
    print("asked")
