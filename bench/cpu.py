"""How fast gpt/pretrain.py learns and scales on this machine's CPU, with one thread per rank

First, two ranks train for two minutes, on a part of Python's own source code: the val loss by time.
Then one rank and two in turn, seven times: the ratio of their tokens per second.
"""

import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "gpt" / "pretrain.py"
CONTEXT, VAL_CHUNKS, BATCH_SIZE = 64, 1024, 32  # of gpt/pretrain.py; the last is that of a rank
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def write_text(path, chunks):
    """Writes the first chunks of Python's own source code."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    path.write_bytes(text[: chunks * CONTEXT + 1])


def train(ranks, epochs, steps_per_epoch):
    """Yields the lines of a training, each with the seconds since its start."""
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text"), VAL_CHUNKS + steps_per_epoch * ranks * BATCH_SIZE)
        arguments = f"{epochs} 1 --text text --batch_size {BATCH_SIZE}"
        process = subprocess.Popen(
            f"torchrun --standalone --nproc_per_node={ranks} {SCRIPT} {arguments}".split(),
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        start = time.perf_counter()
        for line in process.stdout:
            yield time.perf_counter() - start, line.rstrip()
        if process.wait():
            raise SystemExit("pretrain.py failed")


def tokens_per_second(ranks):
    """Returns the tokens per second of the second of two epochs."""
    lines = [line for _, line in train(ranks, epochs=2, steps_per_epoch=20)]
    return float(re.findall(r"(\S+) tokens/s", "\n".join(lines))[-1].replace(",", ""))


def learn():
    for seconds, line in train(2, epochs=5, steps_per_epoch=85):
        print(f"{seconds:6.1f} s  {line}", flush=True)


def scale():
    ratios = []
    for _ in range(7):
        one = tokens_per_second(1)
        two = tokens_per_second(2)
        ratios.append(two / one)
        print(f"1 rank {one:,.0f} tokens/s, 2 ranks {two:,.0f}: {ratios[-1]:.2f} times", flush=True)
    print(f"median: {statistics.median(ratios):.2f} times")


if __name__ == "__main__":
    learn()
    scale()
