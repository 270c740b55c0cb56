"""How fast recipes/gpt.py learns and scales on this machine's CPU, with one thread per rank

First, two ranks train for two minutes: the val loss by time. Then one rank and two in turn, seven
times: the ratio of their tokens per second.
"""

import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "recipes" / "gpt.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def train(ranks, arguments):
    """Yields the lines of a training, each with the seconds since its start."""
    with tempfile.TemporaryDirectory() as folder:
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
            raise SystemExit("gpt.py failed")


def tokens_per_second(ranks):
    """Returns the tokens per second of the second of two epochs."""
    lines = [line for _, line in train(ranks, "2 2 --steps_per_epoch 20")]
    return float(re.findall(r"(\S+) tokens/s", "\n".join(lines))[-1].replace(",", ""))


def learn():
    for seconds, line in train(2, "5 1 --steps_per_epoch 85"):
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
