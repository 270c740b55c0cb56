"""Train, resuming within an epoch, with the same command on each node (HOST is one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        recipes/mid_epoch.py 50 10

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the file or name another one with --snapshot_path.
To train your own model, replace ToyModel, ToyDataset and the lines of main that build them.
"""

import argparse
import os
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm


class ToyModel(nn.Module):
    """Maps inputs of shape (batch, 10) to outputs of shape (batch, 5)."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, inputs):
        return self.net2(self.relu(self.net1(inputs)))


class ToyDataset(Dataset):
    """`size` inputs of shape (10,), each with a target of shape (5,), a linear function of it."""

    def __init__(self, size):
        # Seeded, so that every process and every restart has the same samples.
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 10, generator=generator)
        self.targets = self.inputs @ torch.randn(10, 5, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class ResumableSampler(DistributedSampler):
    """Yields this rank's shard of the samples of an epoch, from sample `samples_run` on."""

    def set_position(self, epoch, samples_run):
        self.epoch = epoch
        self.samples_run = samples_run

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        for start in range(self.samples_run, len(order), self.num_replicas):
            # After the last sample comes the first, since all ranks must take equally many.
            yield order[(start + self.rank) % len(order)]


def leave_process_group(worker_id):
    """Keeps signals from a data worker: torchrun and Ctrl-C send them to the rank's whole group."""
    os.setpgrp()


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`; resumes if a snapshot exists.

    A snapshot holds all that is needed to resume: the state_dicts of `model` and `optimizer`, and
    `epochs_run`, the number of completed epochs and so the index of the next one.
    Of that next epoch, the first `samples_run` samples are trained already.
    """

    def __init__(self, model, train_loader, loss_fn, optimizer, device, args):
        self.model = model
        self.train_loader = train_loader
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0
        self.loss = 0.0
        self.samples_run = 0
        self.steps = 0  # since this process has started
        self.stop_requested = False
        if os.path.exists(args.snapshot_path):
            self._load_snapshot(args.snapshot_path)
        self._check_start_epoch()
        self.model = nn.parallel.DistributedDataParallel(model)  # no device_ids: we move the inputs
        self.is_main = dist.get_rank() == 0  # this process logs and saves
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._request_stop)

    def _request_stop(self, signum, frame):
        self.stop_requested = True

    def _check_start_epoch(self):
        """Exits if the ranks start at different epochs: not all nodes have the newest snapshot."""
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, f"{self.epochs_run} + {self.samples_run} samples")
        if min(starts) < max(starts):
            sys.exit(f"ranks start at epochs {starts}: use a shared disk, or copy the snapshot")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        """Trains one epoch and sets `self.loss` to its mean loss per sample."""
        # Seeding by epoch gives a resumed run the same sample order and dropout as an unbroken one.
        self.train_loader.sampler.set_position(epoch, self.samples_run)
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        total_loss = torch.zeros((), device=self.device)
        if self.samples_run:  # resumed within the epoch
            total_loss += self.loss * self.samples_run / dist.get_world_size()
        for inputs, targets in self.train_loader:
            # Seeding by step, too: a run that is resumed within an epoch has the same dropout.
            first_sample = epoch * len(self.train_loader.dataset) + self.samples_run
            torch.manual_seed(self.args.seed + first_sample + dist.get_rank())
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(inputs, targets)
            total_loss.add_(loss, alpha=len(inputs))
            self.samples_run += len(inputs) * dist.get_world_size()
            self.steps += 1
            # Checking costs time, so it is done every fifth step.
            stop = self.steps % 5 == 0 and self._on_any_rank(self.stop_requested)
            if stop or self.steps % self.args.save_every_steps == 0:
                self._average_loss(total_loss)
                self._save_snapshot()
            if stop:
                self._on_any_rank(False)  # waits for rank 0
                sys.exit("stopped by a signal")
        self._average_loss(total_loss)

    def _average_loss(self, total_loss):
        """Averages `total_loss` over the ranks and sets `self.loss` to the mean per sample."""
        dist.all_reduce(total_loss)  # the sum over all ranks
        total_loss /= dist.get_world_size()
        self.loss = total_loss.item() * dist.get_world_size() / self.samples_run

    def _on_any_rank(self, flag):
        """Returns whether `flag` is set on any rank. All ranks must call it; it is a barrier."""
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags)
        return flags.item() > 0

    def _save_snapshot(self):
        if not self.is_main:
            return
        snapshot = {
            "model": self.model.module.state_dict(),  # without the DDP wrapper
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
            "samples_run": self.samples_run,
            "loss": self.loss,
        }
        path = self.args.snapshot_path
        tmp_path = f"{path}.tmp"
        try:
            with open(tmp_path, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(tmp_path, path)  # atomic: `path` is always a complete snapshot
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch.save wraps the error of a full disk
            sys.exit(f"cannot save {path} ({reason}): disk full, or file used by another run?")
        position = f"epoch {self.epochs_run} + {self.samples_run} samples"
        self._log(f"{position} | loss {self.loss:.4g} | saved {path}")

    def _load_snapshot(self, path):
        try:
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
            self.samples_run = snapshot.get("samples_run", 0)
            self.loss = snapshot.get("loss", 0.0)
        except Exception as error:
            sys.exit(f"cannot load {path} ({error!r:.150}): move it or set another --snapshot_path")

    def _log(self, message):
        if not self.is_main:
            return
        tqdm.write(message)

    def train(self):
        start_epoch = self.epochs_run
        total = self.args.total_epochs
        steps = len(self.train_loader)
        location = f"{self.device} of {socket.gethostname()}"
        self._log(f"{start_epoch} of {total} epochs done, {steps} steps per epoch, on {location}")
        if start_epoch >= total:
            self._log("nothing left to train: raise total_epochs, or set another --snapshot_path")
        elif self.samples_run:
            self._log(f"resuming within epoch {start_epoch + 1}, after {self.samples_run} samples")
        epochs = range(start_epoch, total)
        disable = None if self.is_main else True  # None: disabled unless on a terminal
        progress = tqdm(epochs, initial=start_epoch, total=total, unit="epoch", disable=disable)
        for epoch in progress:
            self._run_epoch(epoch)
            progress.set_postfix(loss=f"{self.loss:.4g}")
            self.epochs_run = epoch + 1
            self.samples_run = 0
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", nargs="?", type=int, default=50)
    parser.add_argument("save_every", nargs="?", type=int, default=10, help="epochs per snapshot")
    parser.add_argument("--save_every_steps", type=int, default=100, help="steps per snapshot")
    parser.add_argument("--batch_size", type=int, default=32, help="per device")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if min(args.total_epochs, args.save_every, args.save_every_steps, args.batch_size) < 1:
        parser.error("total_epochs, the save intervals and --batch_size must be 1 or more")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    snapshot_dir = os.path.dirname(os.path.abspath(args.snapshot_path))
    if not os.access(snapshot_dir, os.W_OK):
        parser.error(f"cannot write into {snapshot_dir}: create it, or set --snapshot_path")
    return args


@record  # torchrun then shows the traceback of the rank that failed first
def main(local_rank, args):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # logs get whole lines at once
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{socket.gethostname()} has too few GPUs: lower --nproc_per_node")
        torch.cuda.set_device(local_rank)  # replaces device_id, which is for GPUs only
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts on {socket.gethostname()}")
    torch.manual_seed(args.seed)
    dataset = ToyDataset(2048)
    model = ToyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.MSELoss()
    sampler = ResumableSampler(dataset, seed=args.seed)
    train_loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        worker_init_fn=leave_process_group,
        pin_memory=device.type == "cuda",
    )
    Trainer(model, train_loader, loss_fn, optimizer, device, args).train()
    time.sleep(0.1)  # CPU only: gloo's threads finish before Python exits (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    main(int(os.environ["LOCAL_RANK"]), args)
