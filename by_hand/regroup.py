"""Train on CPUs while processes come and go, without restarting the others. Once, on HOST:

    python by_hand/coordinator.py HOST:29400

Then, for each device, on any node:

    python by_hand/regroup.py 50 10 --coordinator HOST:29400

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the file or name another one with --snapshot_path.
To train your own model, replace ToyModel, ToyDataset and the lines of main that build them.
"""

import argparse
import io
import os
import select
import signal
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

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
        generator = torch.Generator().manual_seed(0)  # the same samples each time
        self.inputs = torch.randn(size, 10, generator=generator)
        self.targets = self.inputs @ torch.randn(10, 5, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class ResumableSampler(DistributedSampler):
    """Yields this rank's shard of each global batch of an epoch, from sample `samples_run` on."""

    def __len__(self):
        return len(range(0, len(self.dataset), self.global_batch_size))

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        for start in range(self.samples_run, len(order), self.global_batch_size):
            global_batch = order[start : start + self.global_batch_size]
            shard = global_batch[self.rank :: self.num_replicas]
            yield shard or global_batch[:1]  # DDP needs a batch on every rank


class Group:
    """The process group, which the coordinator forms anew when a process leaves or joins."""

    def __init__(self, device, args):
        self.options = {"backend": "gloo", "timeout": timedelta(seconds=args.timeout)}
        if device.type == "cuda":
            self.options |= {"backend": "nccl", "device_id": device}
        try:
            host, port = args.coordinator.rsplit(":", 1)
            self.store = dist.TCPStore(host, int(port) + 1, timeout=timedelta(seconds=30))
            self.coordinator = socket.create_connection((host, int(port)))
        except (OSError, RuntimeError, ValueError) as error:
            sys.exit(f"no coordinator at {args.coordinator}: not started, or finished? {error}")

    def form(self):
        """Waits until all other processes have called this, or are gone, and connects to them."""
        if not dist.is_initialized():  # torch counts failed attempts, until a group is destroyed
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()  # disconnects: ranks that wait for this one get an error
        self.number = 0
        try:
            self.coordinator.sendall(b"g")
            while self.number == 0:  # 0 asks to regroup
                answer = self.coordinator.recv(12, socket.MSG_WAITALL)
                self.number, rank, world_size = struct.unpack("!3i", answer)
        except (OSError, struct.error):
            sys.exit("the coordinator is gone, or has left this process out: it took too long")
        store = dist.PrefixStore(str(self.number), self.store)
        dist.init_process_group(store=store, rank=rank, world_size=world_size, **self.options)

    def process_joins(self):
        """Returns whether the coordinator has asked to form a group."""
        return bool(select.select([self.coordinator], [], [], 0)[0])


def start_own_session(worker_id):
    """Shields a data worker from Ctrl-C, which signals the process group."""
    os.setsid()


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`; resumes if a snapshot exists.

    A snapshot holds everything needed to resume: the state_dicts of `model` and `optimizer`, and
    `epochs_run`, the number of completed epochs, which is the index of the next one.
    The first `samples_run` samples of that epoch are already trained, with mean loss `loss`.
    """

    def __init__(self, model, train_loader, loss_fn, optimizer, device, args):
        self.model = model
        self.world_size = 1
        self.is_main = False
        self.train_loader = train_loader
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.sampler = train_loader.batch_sampler
        self.data_key = f"seed {self.sampler.seed}, {len(train_loader.dataset)} samples"
        self.epochs_run = 0
        self.samples_run = 0
        self.steps = 0
        self.stop_requested = False
        self.next_check = 1  # step number
        self.started_at = time.monotonic()
        self.totals = torch.zeros(2, device=device)  # loss and number of the epoch's samples so far
        self._load_snapshot(args.snapshot_path)
        self.group = Group(device, args)  # from here on, the others wait for this process

    def _request_stop(self, signum, frame):
        self.stop_requested = True

    def _any_rank_stops(self):
        """Returns whether a signal has reached any of the ranks; raises if a process joins."""
        request = 2 if self.group.process_joins() else int(self.stop_requested)
        seconds = time.monotonic() - self.started_at
        values = torch.tensor([float(request), seconds], device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        stop, seconds = values.tolist()  # waits for the GPU: too slow for every step
        if stop == 2:
            raise RuntimeError("a process joins")  # a signal is found again afterwards
        self.next_check += min(100, max(1, int(self.steps / seconds)))  # steps in about a second
        return stop > 0

    def _regroup(self):
        """Forms a group of all processes, with the state of the one that has trained furthest."""
        self.ddp_model = None  # it uses the old group
        self.group.form()
        self.totals *= self.world_size / dist.get_world_size()  # estimates the share of others
        self.world_size = dist.get_world_size()
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, (self.epochs_run, self.samples_run, self.data_key))
        if len({data_key for *_, data_key in starts}) > 1:
            dist.barrier()  # all ranks leave together
            sys.exit(f"ranks start at {starts}: use the same data and one seed")
        if len(set(starts)) > 1:
            src = starts.index(max(starts))
            if dist.get_rank() == src:
                self.save_after_failure()
            data = [Path(self.args.snapshot_path).read_bytes() if dist.get_rank() == src else None]
            dist.broadcast_object_list(data, src)
            self._load_snapshot(io.BytesIO(data[0]))
        self.rank = dist.get_rank()
        self.is_main = self.rank == 0  # this process logs and saves
        self.sampler.rank = self.rank
        self.sampler.num_replicas = self.world_size
        self.steps = 0  # the same on all ranks
        self.next_check = 1
        self.started_at = time.monotonic()
        self.ddp_model = nn.parallel.DistributedDataParallel(self.model)
        self._log(f"group {self.group.number}: {dist.get_world_size()} processes")

    def _run_batch(self, inputs, targets):
        left = len(self.train_loader.dataset) - self.samples_run
        global_size = min(self.args.global_batch_size, left)
        local_size = len(range(dist.get_rank(), global_size, dist.get_world_size()))  # may be 0
        size = min(len(inputs), local_size)
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.ddp_model(inputs), targets)
        (loss * local_size / global_size * dist.get_world_size()).backward()  # DDP averages
        self.optimizer.step()
        self.totals[0] += loss.detach() * size
        self.totals[1] += size

    def _run_epoch(self, epoch):
        """Trains an epoch to its end and sets `self.loss` to its mean loss per sample."""
        # A resumed run must have the same sample order and dropout as an uninterrupted one.
        self.sampler.set_epoch(epoch)
        self.sampler.samples_run = self.samples_run
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        for inputs, targets in self.train_loader:
            samples_seen = epoch * len(self.train_loader.dataset) + self.samples_run
            for generator in (torch.default_generator, *torch.cuda.default_generators):
                generator.manual_seed(self.args.seed + samples_seen + dist.get_rank())
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
            drawn = self.samples_run + self.args.global_batch_size
            self.samples_run = min(drawn, len(self.train_loader.dataset))
            self.steps += 1
            stop = self.steps == self.next_check and self._any_rank_stops()
            if stop or self.steps % self.args.save_every_steps == 0:
                self.loss = self._mean_loss()
                self._save_snapshot()
                self.totals /= dist.get_world_size()  # each rank goes on with its share of the sums
            if stop:
                dist.barrier()  # no rank ends before the snapshot is complete
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / self.totals[1].item()

    def save_after_failure(self):
        """Saves this rank's state unless a snapshot already holds it; other ranks may be gone."""
        saved = (0, 0)  # before the first step, there is nothing to save
        if os.path.exists(self.args.snapshot_path):
            snapshot = torch.load(self.args.snapshot_path, "cpu", mmap=True, weights_only=True)
            saved = (snapshot["epochs_run"], snapshot.get("samples_run", 0))
        self.totals *= self.world_size  # estimates the sums over all ranks from this one's
        if self.samples_run > 0:
            self.loss = self.totals[0].item() / self.totals[1].item()
        if saved < (self.epochs_run, self.samples_run):
            self.is_main = True  # rank 0 may be gone
            self._save_snapshot()

    def _save_snapshot(self):
        finite = torch.stack([weight.isfinite().all() for weight in self.model.parameters()]).all()
        if not finite:
            sys.exit("cannot save: a weight is nan or inf; lower the learning rate?")
        if not self.is_main:
            return
        snapshot = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
            "samples_run": self.samples_run,
            "data_key": self.data_key,
            "loss": self.loss,
            "totals": self.totals,
        }
        path = self.args.snapshot_path
        tmp_path = f"{path}.{self.rank}.tmp"  # each process has its own
        try:
            with open(tmp_path, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(tmp_path, map_location="meta", weights_only=True)  # checks that it loads
            os.replace(tmp_path, path)  # atomic: `path` is always a complete snapshot
        except Exception as error:
            sys.exit(f"cannot save {path}: full disk, another run, or not plain numbers? {error!r}")
        trained = f"epoch {self.epochs_run} + {self.samples_run} samples"
        self._log(f"{trained} | loss {self.loss:.4g} | saved {path}")

    def _load_snapshot(self, source):
        try:
            snapshot = torch.load(source, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
            self.samples_run = snapshot.get("samples_run", 0)
            if self.samples_run > 0 and snapshot["data_key"] != self.data_key:
                raise ValueError(f"its epoch has {snapshot['data_key']}, not {self.data_key}")
            old = torch.tensor([snapshot.get("loss", 0.0), 1.0]) * self.samples_run  # version 1.1
            self.totals.copy_(snapshot.get("totals", old) / self.world_size)
        except FileNotFoundError:
            return  # there is no snapshot yet
        except Exception as error:
            sys.exit(f"cannot load {source}: move it or set another --snapshot_path\n{error!r}")

    def _log(self, message):
        if not self.is_main:
            return
        tqdm.write(f"{message}\n", end="")  # one write: processes may share a log

    def train(self):
        """Trains; when a process leaves or joins, regroups and repeats the interrupted step."""
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._request_stop)
        failures = 0
        while True:
            position = (self.epochs_run, self.samples_run)
            try:
                self._regroup()
                self._train()
                self.group.coordinator.sendall(b"f")  # finished: the coordinator may end
                return
            except RuntimeError as error:  # from a collective or the script
                failures = failures + 1 if position == (self.epochs_run, self.samples_run) else 0
                if failures == 10:
                    raise
                self._log(f"regrouping: {error}")

    def _train(self):
        total = self.args.total_epochs
        steps = f"{len(self.train_loader)} steps per epoch"
        self._log(f"{self.epochs_run} of {total} epochs done, {steps}, on {self.device}")
        if self.epochs_run >= total:
            self._log("nothing left to train: raise total_epochs, or set another --snapshot_path")
        epochs = range(self.epochs_run, total)
        progress = tqdm(epochs, unit="epoch", disable=None if self.is_main else True)
        for epoch in progress:
            self._run_epoch(epoch)
            progress.set_postfix(loss=f"{self.loss:.4g}")
            self.epochs_run = epoch + 1
            self.samples_run = 0
            self.totals.zero_()
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()


def positive_int(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", nargs="?", type=positive_int, default=50)
    parser.add_argument("save_every", nargs="?", type=positive_int, default=10, help="in epochs")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--save_every_steps", type=positive_int, default=100, help="in steps")
    parser.add_argument("--global_batch_size", type=positive_int, default=64, help="per step")
    parser.add_argument("--timeout", type=positive_int, default=60, help="seconds per collective")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    if not args.snapshot_path or not os.access(os.path.dirname(args.snapshot_path) or ".", os.W_OK):
        parser.error(f"cannot write {args.snapshot_path}: create its folder, or set another path")
    return args


@record  # torchrun then shows the traceback of the rank that failed first
def main(args):
    os.environ.setdefault("LOCAL_RANK", "0")  # started without torchrun
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{socket.gethostname()} has too few GPUs: lower --nproc_per_node")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    torch.manual_seed(args.seed)
    dataset = ToyDataset(2048)
    model = ToyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.MSELoss()
    sampler = ResumableSampler(dataset, num_replicas=1, rank=0, seed=args.seed)  # until _regroup
    sampler.global_batch_size = args.global_batch_size
    train_loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        # Forked from the script, they would keep the connections of a rank that is gone.
        multiprocessing_context="spawn" if args.num_workers > 0 else None,
        persistent_workers=args.num_workers > 0,
        worker_init_fn=start_own_session,
        pin_memory=device.type == "cuda",
    )
    trainer = Trainer(model, train_loader, loss_fn, optimizer, device, args)
    try:
        trainer.train()
    except (RuntimeError, SystemExit):  # the latter if the coordinator is gone
        if device.type == "cpu" and local_rank == 0:  # after NCCL errors, weights may be garbage
            trainer.save_after_failure()
        raise
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
