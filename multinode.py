"""Train on many machines; on each: torchrun --nnodes=2 --nproc_per_node=4 multinode.py 50 10

Export on each, first, where they meet, HOST being one of them, and a name for the run:
PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=HOST:29400 PET_RDZV_ID=my_run

Trains for 50 epochs and saves a snapshot every 10. Started again, it goes on from the snapshot;
to start afresh, delete the file, or name another one with --snapshot_path.
To train your own, replace ToyModel, ToyDataset and the lines of main that build what is trained.
"""

import argparse
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data
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


class ToyDataset(data.Dataset):
    """`size` inputs of shape (10,), each with its target of shape (5,), a linear function of it.

    Seeded: every process, and every restart, must see the same samples.
    """

    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(size, 10, generator=generator)
        self.targets = self.inputs @ torch.randn(10, 5, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`, from the snapshot on if any.

    A snapshot holds all that is needed to go on: `model` and `optimizer`, their state_dicts, and
    `epochs_run`, the number of epochs done and so the number of the next one, counted from 0.
    """

    def __init__(self, model, train_data, loss_fn, optimizer, device, args):
        self.model = model
        self.train_data = train_data
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0
        if os.path.exists(args.snapshot_path):
            self._load_snapshot(args.snapshot_path)
        self.model = nn.parallel.DistributedDataParallel(model)
        self.is_main = os.environ["RANK"] == "0"  # one process speaks for all
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.epochs_run, socket.gethostname()))
        (oldest, host), (newest, _) = min(everywhere), max(everywhere)
        if oldest < newest:
            fail(f"{host} starts at epoch {oldest}, not {newest}: share the disk or copy the file")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        """Trains one epoch; `loss` is then the average over it."""
        # The order depends on seed and epoch alone, so that a resumed run repeats it.
        self.train_data.sampler.set_epoch(epoch)
        # So do dropout's random numbers, which are others on each rank.
        torch.manual_seed(hash((self.args.seed, epoch, int(os.environ.get("RANK", 0)))))
        loss = torch.zeros((), device=self.device)
        for inputs, targets in self.train_data:
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss += self._run_batch(inputs, targets)
        dist.all_reduce(loss)  # now the sum over all ranks
        loss /= dist.get_world_size()
        self.loss = loss.item() / len(self.train_data)

    def _save_snapshot(self):
        if not self.is_main:
            return
        snapshot = {
            "model": self.model.module.state_dict(),  # as without DDP
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
        }
        path = self.args.snapshot_path
        part = path + ".tmp"
        try:
            # Never half a snapshot: the old one stays until the new one is complete.
            with open(part, "wb") as file:
                torch.save(snapshot, file)
            os.replace(part, path)
            self._log(f"epoch {self.epochs_run} | loss {self.loss:.4g} | saved {path}")
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch puts its own in front of a full disk's
            fail(f"cannot save {path} ({reason}): make room, or set --snapshot_path")

    def _load_snapshot(self, path):
        try:
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
            fail(f"{path} is no snapshot of this model; move it or set --snapshot_path ({reason})")

    def _log(self, line):
        if not self.is_main:
            return
        tqdm.write(line)

    def train(self):
        done, total = self.epochs_run, self.args.total_epochs
        todo = f"{len(self.train_data)} steps each" if done < total else "ask for more to go on"
        where = f"{self.args.snapshot_path} on {self.device}"
        self._log(f"{where}: {done} of {total} epochs done, {todo}")
        hidden = None if self.is_main else True  # None: on a terminal only
        bar = tqdm(range(done, total), initial=done, total=total, unit="epoch", disable=hidden)
        for epoch in bar:
            self._run_epoch(epoch)
            bar.set_postfix(loss=f"{self.loss:.4g}")
            self.epochs_run = epoch + 1
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()


def fail(problem):
    """Ends this process with one line on stderr and exit status 1."""
    # The first process of a machine speaks for all; at its end the launcher ends the others.
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    sys.exit(f"{os.path.basename(__file__)}: {problem}")


def pick_device(local_rank):
    """Returns the GPU of this process, `local_rank` on its machine, or the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > gpus:
        host = socket.gethostname()
        fail(f"{host} has {gpus} GPUs for {processes} processes: lower --nproc_per_node")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def at_least(minimum):
    """Returns a type for argparse: whole numbers from `minimum` on."""

    def whole_number(text):
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be {minimum} or more, not {text}")
        return int(text)

    return whole_number


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.error = fail
    parser.add_argument("total_epochs", nargs="?", type=at_least(1), default=50)
    parser.add_argument("save_every", nargs="?", type=at_least(1), default=10, help="in epochs")
    parser.add_argument("--batch_size", type=at_least(1), default=32, help="per device")
    parser.add_argument("--num_workers", type=at_least(0), default=0)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=at_least(0), default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        fail(f"start it with: {__doc__.splitlines()[0].partition(': ')[2]} (see also its top)")
    folder = os.path.dirname(os.path.abspath(args.snapshot_path))
    if not os.access(folder, os.W_OK):
        fail(f"cannot write into {folder}: create it, or set --snapshot_path")
    return args


def main(local_rank, args):
    sys.stdout.reconfigure(line_buffering=True)  # a log file, too, shows each line at once
    device = pick_device(local_rank)
    # Our own store and port: torchrun's keeps the addresses of the dead after a restart (2.13).
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) // 2)
    try:
        dist.init_process_group()
    except dist.DistNetworkError:
        fail(f"port {os.environ['MASTER_PORT']} is taken or silent: try another MASTER_PORT")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts on {socket.gethostname()}")
    torch.manual_seed(args.seed)
    dataset = ToyDataset(2048)
    model = ToyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.MSELoss()
    sampler = data.DistributedSampler(dataset, seed=args.seed)
    train_data = data.DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type == "cuda",
    )
    Trainer(model, train_data, loss_fn, optimizer, device, args).train()
    time.sleep(0.1)  # gloo's threads tidy up: once Python ends, that aborts (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    main(int(os.environ["LOCAL_RANK"]), args)
