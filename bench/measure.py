"""Measures what a training step costs, on all ranks that torchrun starts:

    torchrun --standalone --nproc_per_node=2 -m bench.measure

Prints the time and the bus bandwidth of all-reduces of several sizes, and how long a step of the
model of gpt/pretrain.py takes, with and without its all-reduce. --json keeps the figures.
"""

import argparse
import functools
import json
import os
import statistics
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


def median_time(function, repetitions):
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


def bus_bandwidth(size, seconds, ranks):
    """Returns the bytes per second that cross each rank's link, by nccl-tests' definition."""
    return 2 * (ranks - 1) / ranks * size / seconds


def measure_training(batch_size, repetitions, device):
    """Trains a GPT by DDP, on batches of `batch_size` chunks of text.

    Returns the bytes of its gradients, the seconds of a step, and how many of these it waits for
    the all-reduce: those that it takes longer than a step without one.
    """
    torch.manual_seed(0)
    dataset = TextDataset(Path(statistics.__file__), CONTEXT)  # any text
    sampler = RandomSampler(dataset, replacement=True, num_samples=10**6)
    batches = iter(DataLoader(dataset, batch_size, sampler=sampler))
    sizes = {"n_layer": N_LAYER, "n_head": N_HEAD, "n_embd": N_EMBD, "context": CONTEXT}
    model = GPT(SimpleNamespace(**sizes, recompute=False)).to(device)
    model.init_weights(seed=0)
    optimizer = configure_optimizer(model, 1e-3)
    model = nn.parallel.DistributedDataParallel(model)

    def run_step():
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        optimizer.zero_grad()
        next_byte_loss(model(inputs), targets).backward()
        optimizer.step()

    def run_step_alone():
        with model.no_sync():
            run_step()

    step, alone = (median_time(run, repetitions) for run in (run_step, run_step_alone))
    return {
        "name": f"{batch_size} chunks per rank",
        "gradient_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "step": step,
        "wait": max(0.0, step - alone),
    }


def measure(args, device):
    """Returns the figures; see `report`."""
    figures = {"ranks": dist.get_world_size(), "all_reduce": {}}
    for size in GPU_SIZES if device.type == "cuda" else SIZES:
        all_reduce = functools.partial(dist.all_reduce, torch.zeros(size // 4, device=device))
        figures["all_reduce"][size] = median_time(all_reduce, args.repetitions)
    figures["trainings"] = [
        measure_training(size, args.repetitions, device) for size in args.batch_size
    ]
    return figures


def report(figures):
    ranks = figures["ranks"]
    print(f"{'all-reduce, bytes':>18}{'ms':>10}{'busbw MB/s':>12}")
    for size, seconds in figures["all_reduce"].items():
        bandwidth = bus_bandwidth(size, seconds, ranks) / 1e6
        print(f"{size:>18,}{seconds * 1e3:>10.2f}{bandwidth:>12.1f}")
    for training in figures["trainings"]:
        step, wait = (1e3 * training[name] for name in ("step", "wait"))
        size = f"{training['gradient_bytes'] / 1e6:.1f} MB of gradients"
        print(f"{training['name']}, {size}: {step:.0f} ms per step, {wait:.0f} of them waiting")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_size", type=int, nargs="+", default=[32], help="per rank")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--json")
    args = parser.parse_args()
    if min(args.repetitions, *args.batch_size) < 1:
        parser.error("--repetitions and --batch_size must be 1 or more")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    figures = measure(args, device)
    if dist.get_rank() == 0:
        report(figures)
        if args.json:
            Path(args.json).write_text(json.dumps(figures))
    time.sleep(0.1)  # as in multinode.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
