"""docs/choose.md: compares calculated memory with the peaks of processes on the CPU

Each rank trains three steps of a tiny model first, so that what every process needs is there, and
then three of the model that is measured. The system tells how far its memory has grown at the peak.
Linux only, since it reads /proc; in float32, as all files of gpt/ train on a CPU.
It fails if a calculated peak is more than 15 % off.
"""

import ctypes
import importlib
import os
import re
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from torch import nn

from bench.launch import output_of
from tools.formulas.memory import BLOCK_TYPES, GPT, memory
from tools.launch.snapshots import write_text

VOCAB_SIZE = 4096  # in the place of 256, so that the logits count
CONTEXT = 256
VAL_CHUNKS = 32
OF_TOKENS = ("llama", "chunked_loss")
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
    ("llama", 2, "--recompute", (2, 64, 32)),
    ("chunked_loss", 2, "--recompute --loss_chunks 4", (2, 64, 32)),
    ("three_d", 8, "--pp_size 2 --tp_size 2 --micro_batches 4", (12, 256, 4)),
]


def write_tokens(folder):
    """Writes the bytes of the text as tokens of a larger vocabulary."""
    vocabulary = {str(number): number for number in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(vocabulary, "0")).save(str(folder / "tokenizer.json"))
    tokens = b"".join(bytes([byte, 0]) for byte in (folder / "text").read_bytes())
    (folder / "0.uint16").write_bytes(tokens)


def process_memory(field):
    """Returns a size that the system tells of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def train(script, n_layer, n_embd, arguments):
    model = f"--n_layer {n_layer} --n_head 4 --n_embd {n_embd} --context {CONTEXT}"
    sys.argv = [script.__name__, "1", "1", *model.split(), "--generate", "0", *arguments]
    script.main(script.parse_args())


def measure(name, n_layer, n_embd, *arguments):
    """Trains on this rank, and prints the growth of its memory."""
    script = importlib.import_module(f"gpt.{name}")

    class LargeVocabularyGPT(script.GPT):
        def __init__(self, config):
            super().__init__(config)
            self.token_embedding = nn.Embedding(VOCAB_SIZE, config.n_embd)
            self.head = nn.Linear(config.n_embd, VOCAB_SIZE, bias=False)

    if name not in OF_TOKENS:  # these have it from the tokenizer
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
    print(f"peak: {peak} bytes\n", end="")  # one write: ranks print at the same time
    destroy_process_group()


def run(name, ranks, options, shape):
    """Returns the bytes of the peak as predicted, and as measured on the rank that took most."""
    n_layer, n_embd, samples = shape
    tp = 2 if "--tp_size" in options else 1
    pp, micro_batches = (2, 4) if "--pp_size" in options else (1, 1)
    params = 12 * n_layer * n_embd**2 + (2 * VOCAB_SIZE + CONTEXT) * n_embd  # of Llama about
    block = BLOCK_TYPES["llama" if name in OF_TOKENS else "gpt"]
    model = GPT(params, n_layer, n_embd, VOCAB_SIZE, CONTEXT, block)
    shards = 1 if name == "pretrain" else ranks
    recompute, compiled = "--recompute" in options, "--compile" in options
    loss_chunks = int((re.findall(r"--loss_chunks (\d+)", options) or [1])[0])
    parts = memory(model, samples, 4, shards, recompute, tp, pp, compiled, loss_chunks)
    batch_size = samples * micro_batches
    chunks = STEPS * batch_size * ranks // (tp * pp) + VAL_CHUNKS
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text"), chunks, CONTEXT)
        data = f"--text {folder}/text"
        if name in OF_TOKENS:
            write_tokens(Path(folder))
            data = f"--data {folder}"
        output = output_of(
            f"torchrun --standalone --nproc_per_node={ranks} -m bench.memory_peaks"
            f" {name} {n_layer} {n_embd} {options} {data}"
            f" --batch_size {batch_size} --val_tokens {VAL_CHUNKS * CONTEXT}"
        )
    return parts["peak"], max(map(int, re.findall(r"peak: (\d+) bytes", output)))


def report():
    ratios = []
    print(f"{'MB per rank':<50}{'ranks':>6}{'predicted':>11}{'measured':>10}{'ratio':>7}")
    for name, ranks, options, shape in RUNS:
        predicted, measured = run(name, ranks, options, shape)
        ratios.append(predicted / measured)
        sizes = f"{predicted / 1e6:>11.0f}{measured / 1e6:>10.0f}{ratios[-1]:>7.2f}"
        print(f"{name + '.py ' + options:<50}{ranks:>6}{sizes}", flush=True)
    if max(abs(ratio - 1) for ratio in ratios) > 0.15:
        sys.exit("a calculated peak is more than 15 % off")


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ:  # `run` has started it
        measure(*sys.argv[1:])
    else:
        report()
