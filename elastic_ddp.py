"""Train as machines come and go: torchrun --nnodes=1:3 --nproc_per_node=2 elastic_ddp.py 50 10

Export on each, first, where they meet, HOST being one of them, and a name for the run:
PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=HOST:29400 PET_RDZV_ID=my_run
PET_MAX_RESTARTS=100 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

Trains for 50 epochs and saves a snapshot every 10. Started again, it goes on from the snapshot;
to start afresh, delete the file, or name another one with --snapshot_path.
To train your own, replace ToyModel, ToyDataset and the lines of main that build what is trained.
"""

import argparse
import atexit
import io
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
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


class ElasticSampler(data.DistributedSampler):
    """Deals each global batch of an epoch out to the ranks, from sample `samples_run` on."""

    def __len__(self):
        return len(range(0, len(self.dataset), self.batch_size))

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        for start in range(self.samples_run, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            yield batch[self.rank :: self.num_replicas] or batch[:1]  # weighs 0 if none is left


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`, from the snapshot on if any.

    A snapshot holds all that is needed to go on: `model` and `optimizer`, their state_dicts, and
    `epochs_run`, the number of epochs done and so the number of the next one, counted from 0.
    `samples_run` of that one are done, with `loss` as their average.
    """

    def __init__(self, model, train_data, loss_fn, optimizer, device, args):
        self.model = model
        self.train_data = train_data
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0
        self.samples_run, self.loss, self.saved, self.signals = 0, 0.0, None, []
        if os.path.exists(args.snapshot_path):
            self._load_snapshot(args.snapshot_path)
        self._sync_weights()
        self.model = nn.parallel.DistributedDataParallel(model)
        self.is_main = os.environ["RANK"] == "0"  # one process speaks for all
        self._save_snapshot()
        atexit.register(self._save_snapshot)  # whatever the end, the last complete step is kept
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))

    def _sync_weights(self):
        """Gives every rank the newest snapshot that any node holds, if there is one."""
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.epochs_run, self.samples_run))
        oldest, newest = min(everywhere), max(everywhere)
        if newest <= (0, 0) and oldest < (0, 0):
            fail(f"no {self.args.snapshot_path} is of use: to start afresh, move it away")
        if oldest < newest:
            content, source = [None], everywhere.index(newest)
            if dist.get_rank() == source:
                content = [io.FileIO(self.args.snapshot_path).readall()]
            dist.broadcast_object_list(content, source)
            self._load_snapshot(io.BytesIO(content[0]))

    def _run_batch(self, inputs, targets):
        size = min(self.args.batch_size, len(self.train_data.dataset) - self.samples_run)
        share = len(range(dist.get_rank(), size, dist.get_world_size())) / size
        self.optimizer.zero_grad()
        # The share that this rank has of the batch, and what DDP will divide by.
        loss = self.loss_fn(self.model(inputs), targets) * share * dist.get_world_size()
        loss.backward()
        dist.all_reduce(loss.detach())  # in place; fails before the step if a peer is gone
        self.optimizer.step()
        self.samples_run += size
        self.loss += (loss.item() / dist.get_world_size() - self.loss) * size / self.samples_run

    def _run_epoch(self, epoch):
        """Trains one epoch; `loss` is then the average over it."""
        # The order depends on seed and epoch alone, so that a resumed run repeats it.
        self.train_data.batch_sampler.set_epoch(epoch)
        self.train_data.batch_sampler.samples_run = self.samples_run
        # So do dropout's random numbers, which are others on each rank.
        torch.manual_seed(hash((self.args.seed, epoch, int(os.environ.get("RANK", 0)))))
        for inputs, targets in self.train_data:
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
            if self.signals:
                sys.exit(128 + self.signals[0])  # as a shell tells of a signal
            if self.samples_run // self.args.batch_size % self.args.save_steps == 0:
                self._save_snapshot()

    def _save_snapshot(self):
        if os.environ["LOCAL_RANK"] != "0" or self.saved == (self.epochs_run, self.samples_run):
            return
        snapshot = {
            "model": self.model.module.state_dict(),  # as without DDP
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
            "samples_run": self.samples_run,
            "loss": self.loss,
        }
        path = self.args.snapshot_path
        part = f"{path}.{socket.gethostname()}.{os.environ['GROUP_RANK']}.tmp"
        try:
            # Never half a snapshot: the old one stays until the new one is complete.
            with open(part, "wb") as file:
                torch.save(snapshot, file)
            os.replace(part, path)
            self.saved = epoch, samples = self.epochs_run, self.samples_run
            self._log(f"epoch {epoch} + {samples} samples | loss {self.loss:.7g} | saved {path}")
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch puts its own in front of a full disk's
            print(f"warning: cannot save {path} ({reason}): make room", file=sys.stderr)

    def _load_snapshot(self, path):
        try:
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
            self.samples_run, self.loss = snapshot.get("samples_run", 0), snapshot.get("loss", 0)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
            print(f"warning: {path} is no snapshot of this model ({reason})", file=sys.stderr)
            self.epochs_run = -1

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
            self.epochs_run, self.samples_run = epoch + 1, 0
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
    parser.add_argument("--save_steps", type=at_least(1), default=100, help="within an epoch")
    parser.add_argument("--batch_size", type=at_least(1), default=64, help="of all devices")
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


@record
def main(local_rank, args):
    sys.stdout.reconfigure(line_buffering=True)  # a log file, too, shows each line at once
    device = pick_device(local_rank)
    # Our own store and port: torchrun's keeps the addresses of the dead after a restart (2.13).
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) // 2)
    try:
        dist.init_process_group(timeout=timedelta(seconds=30))  # for a peer whose cable is cut
    except dist.DistNetworkError:
        fail(f"port {os.environ['MASTER_PORT']} is taken or silent: try another MASTER_PORT")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts on {socket.gethostname()}")
    torch.manual_seed(args.seed)
    dataset = ToyDataset(2048)
    model = ToyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.MSELoss()
    sampler = ElasticSampler(dataset, seed=args.seed)
    sampler.batch_size = args.batch_size
    train_data = data.DataLoader(
        dataset,
        batch_sampler=sampler,
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
