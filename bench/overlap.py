"""docs/by_hand/ddp.md: measures when the all-reduces of by_hand/ddp.py run, on a pocket cluster

In backward(), each block of the model pauses instead of computing, because nodes that share a
machine's cores would compete for them.
"""

import os
import re
import statistics
import sys
import time
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from bench.launch import output_of
from gpt.gpt import Block
from tools.steps import ROOT

FORMS = ["after backward()", "a hook each", "buckets"]
PAGE = ROOT / "docs" / "by_hand" / "ddp.md"
CONFIG = SimpleNamespace(n_head=2, n_embd=128)
CONTEXT = 8
PAUSE_S = 0.05  # of a block in backward()


def source(form):
    """Returns the code of a form: one of the two that the page begins with, or by_hand/ddp.py."""
    fences = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    sources = [*fences, (ROOT / "by_hand" / "ddp.py").read_text()]
    return sources[FORMS.index(form)]


def measure(form, blocks, steps):
    """Returns the seconds of each step in one form, and of the last the number of all-reduces:

    of all, and of those that begin before its last block's pause ends.
    """
    namespace = {"nn": nn, "dist": dist, "torch": torch, "__name__": form}
    exec(compile(source(form), form, "exec"), namespace)
    namespace["BUCKET_SIZE"] = sum(p.numel() for p in Block(CONFIG).parameters())
    model = nn.Sequential(*[Block(CONFIG) for _ in range(blocks)])
    seconds, counts = [], []

    def pause(block, gradients):
        """Stands in for the computation of a block's gradients, as a hook that comes before it."""
        time.sleep(PAUSE_S)
        counts.append(all_reduce.call_count)

    for block in model:
        block.register_full_backward_pre_hook(pause)
    model = namespace["DistributedDataParallel"](model)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        for _ in range(1 + steps):  # the first connects the ranks
            # Without a gradient of its own, the first block's hook would warn.
            inputs = torch.randn(1, CONTEXT, CONFIG.n_embd, requires_grad=True)
            loss = model(inputs).square().mean()
            model.zero_grad()
            dist.barrier()
            all_reduce.reset_mock()
            start = time.perf_counter()
            loss.backward()
            model.average_gradients()
            seconds.append(time.perf_counter() - start)
    return seconds[1:], all_reduce.call_count, counts[-1]


def report(rounds=9):
    cluster = "slurm/pocket-cluster -n 2 -g 1 -b 100mbit srun -N 2 --gpus-per-node=1"
    ranks = f"slurm/torchrun_script.sh -m bench.overlap 6 {rounds}"
    print(output_of(f"{cluster} {ranks}"), end="")


def measure_forms(blocks, steps):
    """Measures on this rank; rank 0 prints."""
    dist.init_process_group("gloo")
    for form in FORMS:
        seconds, count, early = measure(form, blocks, steps)
        if dist.get_rank() == 0:
            spread = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}"
            print(
                f"{form}: {1e3 * statistics.median(seconds):.0f} ms ({spread}); of"
                f" {count} all-reduces, {early} begin in backward()"
            )
    time.sleep(0.1)  # as in multinode.py
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ:  # report() has started it
        measure_forms(*map(int, sys.argv[1:]))
    else:
        report()
