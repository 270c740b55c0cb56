"""Each process writes a line for each step."""

import json
import os
import time

import torch
from patched import script

for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
    os.environ.pop(name, None)
torch.set_default_dtype(torch.float64)
record = open(f"{os.getpid()}.steps", "w", buffering=1)
run_batch = script.Trainer._run_batch


def run_and_record(self, inputs, targets):
    if not os.path.exists("calm"):
        time.sleep(0.01 + 0.001 * min(self.epochs_run, 40) ** 2)
    began = time.time()
    position = (self.epochs_run, self.samples_run + self.args.global_batch_size)  # afterwards
    run_batch(self, inputs, targets)
    event = began, position, self.group.number, script.dist.get_world_size()
    record.write(json.dumps(event) + "\n")


script.Trainer._run_batch = run_and_record
