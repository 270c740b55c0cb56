"""Runs a function on four ranks, for the pictures of what really happens there."""

import json
import os
import random
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
FOLDER = Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs" / "assets").resolve()
RANKS, BLOCKS, CONTEXT, BATCH_SIZE = 4, 4, 16, 8  # the batch is that of all ranks together


def run(function, *args, world_size=RANKS):
    """Returns what the function returns on each rank; it runs in a folder that is removed."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, store.port, world_size, function, args)
        start_processes(_run_rank, arguments, world_size, start_method="fork")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def _run_rank(rank, folder, port, world_size, function, args):
    # The variables that torchrun sets.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.chdir(folder)
    torch.set_num_threads(1)
    Path(f"{rank}.json").write_text(json.dumps(function(*args)))


def load(name):
    """Returns a script of gpt/, without its evaluation."""
    script = import_module(f"gpt.{name}")
    script.Trainer._evaluate = lambda self: None
    return script


def train(script, steps, options):
    """Trains a small GPT for some steps."""
    val_tokens = BATCH_SIZE * CONTEXT  # one batch, as a step
    text = Path(f"text-{os.environ['RANK']}")
    text.write_bytes(random.Random(0).randbytes((1 + steps) * val_tokens + 1))
    model = f"--n_layer {BLOCKS} --n_head 4 --n_embd 16 --context {CONTEXT}"
    arguments = f"1 {model} --generate 0 --val_tokens {val_tokens} --text {text} --snapshot_path s"
    arguments += f" {options}"
    sys.argv = [script.__file__, *arguments.split()]
    script.main(script.parse_args())
