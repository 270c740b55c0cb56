"""Times an epoch of the stages beside the same one in bare loops: python bench/epoch_time.py

Prints ratios: the median of 5 rounds, in each of which the contestants train for 30 epochs, taking
turns. Absolute times say little about another machine.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import multigpu_torchrun  # noqa: E402
import singlegpu  # noqa: E402

ROUNDS, EPOCHS = 5, 30
ARGS = argparse.Namespace(seed=0, snapshot_path="no-such-snapshot.pt")


def training(dataset, sampler):
    """Returns model, loader, loss and optimizer as `main` of the stages builds them, on the CPU."""
    torch.manual_seed(0)
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, data.DataLoader(dataset, 32, sampler=sampler), nn.MSELoss(), optimizer


def bare_loop(model, loader, loss_fn, optimizer):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()


def compare(epochs):
    """Times the functions in `epochs`; returns their medians relative to the first, by name."""
    times = {name: [] for name in epochs}
    for _ in range(ROUNDS + 1):
        for seconds in times.values():
            seconds.append(0.0)
        for number in range(EPOCHS):
            # Turn by turn, each in every place: the machine's noise then hits all alike.
            for place in range(len(times)):
                name = list(times)[(place + number) % len(times)]
                if dist.is_initialized():
                    dist.barrier()
                start = time.perf_counter()
                epochs[name](number)
                times[name][-1] += time.perf_counter() - start
    for seconds in times.values():
        del seconds[0]  # the first round warmed up
    first = next(iter(times))
    return {
        name: statistics.median(t / f for t, f in zip(times[name], times[first], strict=True))
        for name in times
        if name != first
    }


def one_rank():
    dataset = singlegpu.ToyDataset(2048)
    model, loader, loss_fn, optimizer = training(
        dataset, data.RandomSampler(dataset, generator=torch.Generator())
    )
    trainer = singlegpu.Trainer(model, loader, loss_fn, optimizer, torch.device("cpu"), ARGS)
    bare = training(dataset, data.RandomSampler(dataset, generator=torch.Generator()))
    contestants = {
        "bare loop": lambda epoch: bare_loop(*bare),
        "singlegpu.py / bare loop over the same loader": trainer._run_epoch,
    }
    return compare(contestants)


def two_ranks():
    dist.init_process_group("gloo")
    dataset = singlegpu.ToyDataset(2048)

    model, loader, loss_fn, optimizer = training(dataset, data.DistributedSampler(dataset))
    trainer = multigpu_torchrun.Trainer(
        model, loader, loss_fn, optimizer, torch.device("cpu"), ARGS
    )

    model, *rest = training(dataset, data.DistributedSampler(dataset))
    raw = DistributedDataParallel(model), *rest

    accelerator = Accelerator(cpu=True)
    model, loader, loss_fn, optimizer = training(dataset, data.RandomSampler(dataset))
    model, loader, optimizer = accelerator.prepare(model, loader, optimizer)

    def accelerate_epoch(epoch):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()

    ratios = compare(
        {
            "raw DDP": lambda epoch: bare_loop(*raw),
            "multigpu_torchrun.py / raw DDP, 2 ranks": trainer._run_epoch,
            "Accelerate / raw DDP, 2 ranks": accelerate_epoch,
        }
    )
    time.sleep(0.1)  # gloo's threads tidy up: once Python ends, that aborts (torch 2.13)
    dist.destroy_process_group()
    return ratios


def main():
    if "LOCAL_RANK" not in os.environ:
        ratios = one_rank()
        command = ["torchrun", "--standalone", "--nproc_per_node=2", __file__]
    else:
        ratios = two_ranks()
    if os.environ.get("RANK", "0") == "0":
        for name, ratio in ratios.items():
            print(f"{name:<50}{ratio:.3f}", flush=True)
    if "LOCAL_RANK" not in os.environ:
        sys.exit(subprocess.call(command))


if __name__ == "__main__":
    main()
