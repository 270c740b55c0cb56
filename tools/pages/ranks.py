"""Runs a function on four ranks, for the pictures of what really happens there."""

import json
import os
import random
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from torch.distributed.tensor import distribute_tensor

from tools.launch.jobs import Shell
from tools.steps import ROOT

RANKS, BLOCKS, CONTEXT, BATCH_SIZE = 4, 4, 16, 8  # the batch is that of all ranks together


def run(function, *args, world_size=RANKS):
    """Returns what the function returns on each rank; it runs in a folder that is removed."""
    module = sys.modules[function.__module__].__spec__.name
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "rank.py")
        script.write_text(
            f"import json, os, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            f"from {module} import {function.__name__}\n"
            f"result = {function.__name__}(*{args!r})\n"
            "open(f\"{os.environ['RANK']}.json\", 'w').write(json.dumps(result))\n"
        )
        Shell(Path(folder)).ranks(str(script), world_size).succeeds()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def shard_like(weight, numbers):
    """Returns what this rank holds of `numbers` if they are sharded as `weight` is."""
    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()


def load(name):
    """Returns a script of gpt/, without its evaluation."""
    script = import_module(f"gpt.{name}")
    script.Trainer._evaluate = lambda self: None
    return script


def train(script, steps, options):
    """Trains a small GPT for some steps."""
    val_tokens = BATCH_SIZE * CONTEXT  # one batch, as a step
    text = Path(os.environ["RANK"], "text")  # of its own, so that it is complete
    text.parent.mkdir()
    text.write_bytes(random.Random(0).randbytes((1 + steps) * val_tokens + 1))
    model = f"--n_layer {BLOCKS} --n_head 4 --n_embd 16 --context {CONTEXT}"
    arguments = f"1 {model} --generate 0 --val_tokens {val_tokens} --text {text} --snapshot_path s"
    arguments += f" {options}"
    sys.argv = [script.__file__, *arguments.split()]
    script.main(script.parse_args())
