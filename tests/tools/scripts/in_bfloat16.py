"""Each batch is trained in bfloat16, as mixed_precision.py does it on CPUs."""

import torch
from patched import script

run_batch = script.Trainer._run_batch


def run_in_bfloat16(*arguments):
    with torch.autocast("cpu", torch.bfloat16):
        run_batch(*arguments)


script.Trainer._run_batch = run_in_bfloat16
