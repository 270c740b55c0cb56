"""Times an epoch of the stages, on two ranks and CPUs, beside the same one with DDP alone

    torchrun --standalone --nproc_per_node=2 -m bench.epoch_time --sleep_ms 20

Prints ratios: the median of 5 rounds, in each of which the candidates train for 30 epochs, taking
turns. Absolute times say little about another machine. --sleep_ms makes each step longer.
"""

import argparse
import contextlib
import importlib
import io
import os
import statistics
import tempfile
import time
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import singlegpu

BATCH_SIZE = 32  # per rank
RARELY = "--save_every_steps 1000000"  # no snapshot while it is timed
STAGES = {
    "multigpu_torchrun": "",
    "multinode": "",
    "resumable": RARELY,
    "preemptible": RARELY,
    "elastic_ddp": f"{RARELY} --global_batch_size {2 * BATCH_SIZE}",
    "recipes.stream": f"{RARELY} --global_batch_size {2 * BATCH_SIZE}",
}


def epoch_of(name, arguments):
    """Returns a function that trains an epoch, from its first sample on, as a script does."""
    module = importlib.import_module(name)
    trainers = []
    module.Trainer.train = lambda self: trainers.append(self)
    argv = [name, *arguments.split(), "--snapshot_path", f"{name}.pt"]
    with mock.patch("sys.argv", argv), contextlib.redirect_stdout(io.StringIO()):
        module.main(module.parse_args())

    def run_epoch(epoch):
        trainers[0].samples_run = 0
        trainers[0]._run_epoch(epoch)

    return run_epoch


def raw_ddp_epoch():
    """Returns a function that trains an epoch with DDP and nothing but the training step."""
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = singlegpu.ToyDataset(2048)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(model)

    def run_epoch(epoch):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    return run_epoch


def make_candidates():
    """Returns functions that train an epoch, by name."""
    candidates = {"raw DDP": raw_ddp_epoch()}
    # The scripts' own calls do nothing: the group is there already.
    calls = {"init_process_group": mock.DEFAULT, "destroy_process_group": mock.DEFAULT}
    with mock.patch.multiple(dist, **calls):
        for name, arguments in STAGES.items():
            candidates[f"{name.replace('.', '/')}.py"] = epoch_of(name, arguments)
    return candidates


def compare(candidates, epochs, rounds):
    """Times the functions; returns for each the median of its times relative to the first's."""
    names = list(candidates)
    ratios = {name: [] for name in names}
    for number in range(1 + rounds):
        seconds = Counter()
        for epoch in range(epochs):
            # Turn by turn, each in every place: the machine's noise then hits all alike.
            first = epoch % len(names)
            for name in names[first:] + names[:first]:
                dist.barrier()
                start = time.perf_counter()
                candidates[name](epoch)
                seconds[name] += time.perf_counter() - start
        for name in names if number else ():  # once warm
            ratios[name].append(seconds[name] / seconds[names[0]])
    return {name: statistics.median(found) for name, found in ratios.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30, help="of each candidate in each round")
    parser.add_argument("--sleep_ms", type=float, default=0)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("rounds must be 1 or more")

    def sleep(module, inputs):
        if type(module).__name__ == "ToyModel":
            time.sleep(args.sleep_ms / 1000)

    if args.sleep_ms:
        register_module_forward_pre_hook(sleep)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks cannot share a GPU
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        ratios = compare(make_candidates(), args.epochs, args.rounds)
    if dist.get_rank() == 0:
        for name, ratio in ratios.items():
            print(f"{name:<24}{ratio:.3f} x raw DDP", flush=True)
    time.sleep(0.1)  # as in multigpu.py
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
