"""Compares the formula of bench/memory.py with the peaks of processes on the CPU: memory_peaks.py

Each rank trains three steps of a tiny model first, so that what every process needs is there, and
then three of the model that is measured. The system tells how far its memory has grown at the peak.
Linux only, since it reads /proc; in float32, as all files of gpt/ train on a CPU.
"""

import argparse
import ctypes
import importlib
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from memory import GPT, memory

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 4096  # in the place of 256, so that the logits count
CONTEXT = 256
VAL_CHUNKS = 32
STEPS = 3  # AdamW's averages exist from the end of the first on, DDP's final buckets of the second
# Script, ranks, options, and the shape: n_layer, n_embd, and samples of a rank or a group.
RUNS = [
    ("pretrain", 2, "", (8, 384, 1)),
    ("pretrain", 1, "", (8, 128, 16)),
    ("pretrain", 1, "--recompute", (24, 128, 16)),
    ("pretrain", 1, "--recompute --compile", (2, 128, 16)),
    ("fsdp", 2, "", (12, 256, 4)),
    ("fsdp", 4, "", (12, 512, 1)),
    ("fsdp", 2, "--recompute", (24, 128, 16)),
    ("tensor_parallel", 2, "--tp_size 2", (12, 256, 8)),
    ("tensor_parallel", 4, "--tp_size 2 --recompute", (12, 256, 8)),
    ("three_d", 8, "--pp_size 2 --tp_size 2 --micro_batches 4", (12, 256, 4)),
]


def process_memory(field):
    """Returns a size that the system tells of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def train(script, n_layer, n_embd, arguments):
    model = f"--n_layer {n_layer} --n_head 4 --n_embd {n_embd} --context {CONTEXT}"
    sys.argv = [script.__name__, "1", "1", *model.split(), "--generate", "0", *arguments]
    script.main(script.parse_args())


def measure(name, n_layer, n_embd, arguments):
    """Trains on this rank, and prints the growth of its memory."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(f"gpt.{name}")
    from torch import nn

    class LargeVocabularyGPT(script.GPT):
        def __init__(self, config):
            super().__init__(config)
            self.token_embedding = nn.Embedding(VOCAB_SIZE, config.n_embd)
            self.head = nn.Linear(config.n_embd, VOCAB_SIZE, bias=False)

    script.GPT = LargeVocabularyGPT
    script.Trainer._evaluate = lambda self: None
    script.Trainer._save_snapshot = lambda self: None
    destroy_process_group = script.dist.destroy_process_group
    script.dist.destroy_process_group = lambda: None  # both models train with one process group
    # Without this, freed blocks of this size are kept for later, and the system counts them.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    train(script, 2, 16, arguments)
    script.dist.init_process_group = lambda backend: None
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    start = process_memory("VmRSS:")
    train(script, n_layer, n_embd, arguments)
    peak = process_memory("VmHWM:") - start
    Path(f"{os.environ['RANK']}.peak").write_text(str(peak))
    destroy_process_group()


def run(name, ranks, options, shape):
    """Returns the bytes of the peak as predicted, and as measured on the rank that took most."""
    n_layer, n_embd, samples = shape
    tp = 2 if "--tp_size" in options else 1
    pp, micro_batches = (2, 4) if "--pp_size" in options else (1, 1)
    params = 12 * n_layer * n_embd**2 + (2 * VOCAB_SIZE + CONTEXT) * n_embd
    model = GPT(params, n_layer, n_embd, VOCAB_SIZE, CONTEXT)
    shards = 1 if name == "pretrain" else ranks
    recompute, compiled = "--recompute" in options, "--compile" in options
    predicted = memory(model, samples, 4, shards, recompute, tp, pp, compiled)["peak"]
    with tempfile.TemporaryDirectory() as folder:
        batch_size = samples * micro_batches
        chunks = STEPS * batch_size * ranks // (tp * pp) + VAL_CHUNKS
        Path(folder, "text").write_bytes(random.Random(0).randbytes(chunks * CONTEXT + 1))
        script = ["--script", name, "--shape", str(n_layer), str(n_embd)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        options = (
            f"--text text --batch_size {batch_size} --val_tokens {VAL_CHUNKS * CONTEXT} {options}"
        )
        subprocess.run(
            [*torchrun, f"--nproc_per_node={ranks}", __file__, *script, *options.split()],
            check=True,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=sys.stderr,
        )
        measured = max(int(path.read_text()) for path in Path(folder).glob("*.peak"))
    return predicted, measured


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", help=argparse.SUPPRESS)
    parser.add_argument("--shape", nargs=2, type=int, help=argparse.SUPPRESS)
    args, arguments = parser.parse_known_args()
    if args.script:
        return measure(args.script, *args.shape, arguments)
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    print(f"{'MB per rank':<50}{'ranks':>6}{'predicted':>11}{'measured':>10}{'ratio':>7}")
    for name, ranks, options, shape in RUNS:
        predicted, measured = run(name, ranks, options, shape)
        sizes = f"{predicted / 1e6:>11.0f}{measured / 1e6:>10.0f}{predicted / measured:>7.2f}"
        print(f"{name + '.py ' + options:<50}{ranks:>6}{sizes}", flush=True)


if __name__ == "__main__":
    main()
