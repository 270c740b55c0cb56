"""Times an epoch of the stages and recipes beside the same one in other forms: epoch_time.py

Prints ratios: the median of 5 rounds, in each of which the candidates train for 30 epochs, taking
turns. Absolute times say little about another machine. One rank is compared with a bare loop, two
ranks with raw DDP. The floor is a bare loop without DataLoader that all-reduces one flat gradient.
Some candidates alone, on two ranks, with steps that take 20 ms longer, beside the first of them:

    python bench/epoch_time.py --candidates elastic_ddp.py recipes/regroup.py --sleep_ms 20
"""

import argparse
import atexit
import contextlib
import importlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import singlegpu  # noqa: E402

BATCH_SIZE = 32  # per rank
COORDINATOR = "localhost:29411"  # of regroup.py
GLOBAL = "--global_batch_size 64 --save_every_steps 1000000"  # no snapshot while it is timed
MODULES = {
    "multigpu_torchrun": "",
    "multinode": "",
    "resumable": "--save_every_steps 1000000",
    "preemptible": "--save_every_steps 1000000",
    "elastic_ddp": GLOBAL,
    "recipes.mixed_precision": "",
    "recipes.gradient_accumulation": "--batch_size 8 --global_batch_size 64",
    "recipes.evaluate": "",
    "recipes.tensorboard_logging": "",
    "recipes.monitor": "",
    "recipes.stragglers": "",
    "recipes.fsdp": "",
    "recipes.regroup": f"--coordinator {COORDINATOR} {GLOBAL}",
}  # gpt/ trains another model


def build(name, arguments):
    """Returns the Trainer that the main of a script builds."""
    module = importlib.import_module(name)
    if name == "recipes.evaluate":  # of so many, it trains on 2048, as the others do
        dataset = module.ToyDataset(2560)
        module.ToyDataset = lambda size: dataset
    trainers = []
    module.Trainer.train = lambda self: trainers.append(self)
    argv = [name, *arguments.split(), "--snapshot_path", f"{name}.pt"]
    with patch("sys.argv", argv), contextlib.redirect_stdout(io.StringIO()):
        module.main(module.parse_args())
    atexit.unregister(getattr(trainers[0], "_save_after_failure", None))  # elastic_ddp.py's
    return trainers[0]


def training(dataset, sampler):
    """Returns model, loader, loss and optimizer as `main` of the stages builds them, on the CPU."""
    torch.manual_seed(0)
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    return model, loader, nn.MSELoss(), optimizer


def bare_epoch(model, loader, loss_fn, optimizer, backward=torch.Tensor.backward):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        backward(loss)
        optimizer.step()


def floor_epoch(model, dataset, loss_fn, optimizer):
    order = torch.randperm(len(dataset))[dist.get_rank() :: dist.get_world_size()]
    for batch in order.split(BATCH_SIZE):
        optimizer.zero_grad()
        loss_fn(model(dataset.inputs[batch]), dataset.targets[batch]).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))
        optimizer.step()


def compare(candidates, epochs, rounds):
    """Times the functions; returns for each the median of its times relative to the first's."""
    times = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for seconds in times.values():
            seconds.append(0.0)
        for epoch in range(epochs):
            # Turn by turn, each in every place: the machine's noise then hits all alike.
            for offset in range(len(times)):
                name = list(times)[(offset + epoch) % len(times)]
                if dist.is_initialized():
                    dist.barrier()
                start = time.perf_counter()
                candidates[name](epoch)
                times[name][-1] += time.perf_counter() - start
    for seconds in times.values():
        del seconds[0]  # the first round warmed up
    baseline = next(iter(times.values()))
    return {
        name: statistics.median(t / b for t, b in zip(seconds, baseline, strict=True))
        for name, seconds in times.items()
    }


def one_rank():
    dataset = singlegpu.ToyDataset(2048)
    bare = training(dataset, RandomSampler(dataset))
    return {
        "bare loop": lambda epoch: bare_epoch(*bare),
        "singlegpu.py": build("singlegpu", f"--batch_size {BATCH_SIZE}")._run_epoch,
    }


def two_ranks():
    dataset = singlegpu.ToyDataset(2048)
    model, *rest = training(dataset, DistributedSampler(dataset))
    ddp = DistributedDataParallel(model)
    candidates = {"raw DDP": lambda epoch: bare_epoch(ddp, *rest)}

    # The scripts' own calls do nothing: the group is there already.
    with (
        patch("torch.distributed.init_process_group"),
        patch("torch.distributed.destroy_process_group"),
    ):
        for name, arguments in MODULES.items():
            trainer = build(name, arguments)
            candidates[f"{name.replace('.', '/')}.py"] = epoch_of(trainer)

    accelerator = Accelerator(cpu=True)
    model, loader, loss_fn, optimizer = training(dataset, RandomSampler(dataset))
    accelerated_model, accelerated_loader, accelerated_optimizer = accelerator.prepare(
        model, loader, optimizer
    )
    candidates["Accelerate"] = lambda epoch: bare_epoch(
        accelerated_model, accelerated_loader, loss_fn, accelerated_optimizer, accelerator.backward
    )

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=dist.get_world_size())
    fabric.launch()
    model, loader, loss_fn, optimizer = training(dataset, RandomSampler(dataset))
    fabric_model, fabric_optimizer = fabric.setup(model, optimizer)
    fabric_loader = fabric.setup_dataloaders(loader)
    candidates["Fabric"] = lambda epoch: bare_epoch(
        fabric_model, fabric_loader, loss_fn, fabric_optimizer, fabric.backward
    )

    model, _, loss_fn, optimizer = training(dataset, RandomSampler(dataset))
    candidates["floor"] = lambda epoch: floor_epoch(model, dataset, loss_fn, optimizer)
    return candidates


def epoch_of(trainer):
    """Returns a function that trains an epoch, from its first sample on."""
    if hasattr(trainer, "group"):  # regroup.py's
        with contextlib.redirect_stdout(io.StringIO()):
            trainer._regroup()

    def run_epoch(epoch):
        trainer.samples_run = 0
        trainer._run_epoch(epoch)

    return run_epoch


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30, help="of each candidate in each round")
    parser.add_argument("--sleep_ms", type=float, default=0)
    return parser.parse_args()


def main(args):
    def sleep(module, inputs):
        if type(module).__name__ == "ToyModel":
            time.sleep(args.sleep_ms / 1000)

    if args.sleep_ms:
        register_module_forward_pre_hook(sleep)
    distributed = "LOCAL_RANK" in os.environ
    if not distributed and not args.candidates:
        report(compare(one_rank(), args.epochs, args.rounds))
    if not distributed:
        command = ["torchrun", "--standalone", "--nproc_per_node=2", __file__, *sys.argv[1:]]
        with coordinator():
            sys.exit(subprocess.call(command))
    dist.init_process_group("gloo")
    candidates = two_ranks()
    candidates = {name: candidates[name] for name in args.candidates or candidates}
    with contextlib.redirect_stdout(io.StringIO()):  # the lines of monitor.py
        ratios = compare(candidates, args.epochs, args.rounds)
    if dist.get_rank() == 0:
        report(ratios)
    time.sleep(0.1)  # as in multigpu.py
    dist.destroy_process_group()


@contextlib.contextmanager
def coordinator():
    process = subprocess.Popen([sys.executable, ROOT / "recipes" / "coordinator.py", COORDINATOR])
    try:
        yield
    finally:
        process.kill()


def report(ratios):
    baseline = next(iter(ratios))
    for name, ratio in ratios.items():
        print(f"{name:<36}{ratio:.3f} x {baseline}", flush=True)


if __name__ == "__main__":
    arguments = parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        main(arguments)
