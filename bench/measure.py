"""Measures what a training step costs, on all ranks that torchrun starts:

    torchrun --standalone --nproc_per_node=2 -m bench.measure

Prints the time and the bus bandwidth of all-reduces of several sizes, and how long a step of the
model of gpt/pretrain.py takes, with and without its all-reduce.
"""

import functools
import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from gpt.pretrain import GPT, TextDataset, configure_optimizer, next_byte_loss

SIZES = [2**n for n in (10, 14, 18, 20)]  # bytes
GPU_SIZES = [*SIZES, 2**25, 2**28, 2**30]
N_LAYER, N_HEAD, N_EMBD, CONTEXT = 4, 2, 128, 64
BATCH_SIZE = 32  # per rank
REPETITIONS = 10


def median_time(function, repetitions=REPETITIONS):
    """Returns the seconds of a call of `function` on the slowest rank, after one to warm up."""
    wait_for_device = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
    seconds = torch.zeros(repetitions + 1)
    for i in range(repetitions + 1):
        dist.barrier()
        wait_for_device()
        start = time.perf_counter()
        function()
        wait_for_device()
        seconds[i] = time.perf_counter() - start
    slowest = [None] * dist.get_world_size()
    dist.all_gather_object(slowest, seconds)
    return statistics.median(torch.stack(slowest).amax(0)[1:].tolist())


def measure_all_reduces(device):
    print(f"{'all-reduce, bytes':>18}{'ms':>10}{'busbw MB/s':>12}")
    ranks = dist.get_world_size()
    for size in GPU_SIZES if device.type == "cuda" else SIZES:
        tensor = torch.zeros(size // 4, device=device)
        seconds = median_time(functools.partial(dist.all_reduce, tensor))
        # The bytes per second that cross each rank's link, by nccl-tests' definition.
        bandwidth = 2 * (ranks - 1) / ranks * size / seconds / 1e6
        print(f"{size:>18,}{seconds * 1e3:>10.2f}{bandwidth:>12.1f}")


def measure_training(device):
    """Trains a GPT by DDP; a step waits for its all-reduce as long as one without is faster."""
    torch.manual_seed(0)
    dataset = TextDataset(Path(statistics.__file__), CONTEXT)  # any text
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**6)
    batches = iter(DataLoader(dataset, BATCH_SIZE, sampler=sampler))
    sizes = {"n_layer": N_LAYER, "n_head": N_HEAD, "n_embd": N_EMBD, "context": CONTEXT}
    model = GPT(SimpleNamespace(**sizes, recompute=False)).to(device)
    model.init_weights(seed=0)
    optimizer = configure_optimizer(model, 1e-3)
    gradients = 4 * sum(p.numel() for p in model.parameters()) / 1e6
    model = nn.parallel.DistributedDataParallel(model)

    def run_step():
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        next_byte_loss(model(inputs), targets).backward()
        optimizer.step()

    def run_step_alone():
        with model.no_sync():
            run_step()

    step = 1e3 * median_time(run_step)
    wait = max(0.0, step - 1e3 * median_time(run_step_alone))
    print(
        f"{BATCH_SIZE} chunks per rank, {gradients:.1f} MB of gradients:"
        f" {step:.0f} ms per step, {wait:.0f} of them waiting"
    )


def main():
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this script with torchrun, as its first lines show")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    if dist.get_rank() > 0:
        sys.stdout = None  # rank 0 prints
    measure_all_reduces(device)
    measure_training(device)
    time.sleep(0.1)  # as in multinode.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
