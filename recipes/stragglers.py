"""Train and find slow ranks, with the same command on each node (HOST is one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        recipes/stragglers.py 50 10

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the file or name another one with --snapshot_path.
To train your own model, replace ToyModel, ToyDataset and the lines of main that build them.
"""

import argparse
import os
import socket
import statistics
import sys
import time
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
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


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`; resumes if a snapshot exists.

    A snapshot holds everything needed to resume: the state_dicts of `model` and `optimizer`, and
    `epochs_run`, the number of completed epochs, which is the index of the next one.
    """

    def __init__(self, model, train_loader, loss_fn, optimizer, device, args):
        self.model = model
        self.train_loader = train_loader
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.sampler = train_loader.sampler
        self.is_main = dist.get_rank() == 0  # logs and saves for all ranks
        self.data_key = f"seed {self.sampler.seed}, {len(train_loader.dataset)} samples"
        self.epochs_run = 0
        self.steps_run = 0
        self.totals = torch.zeros(2, device=device)  # loss and number of the epoch's samples so far
        self._load_snapshot(args.snapshot_path)
        self._agree_on_start()
        self.model = nn.parallel.DistributedDataParallel(model)  # averages gradients
        self.samples = 0  # on this rank, since the last log line
        self.start_time = time.perf_counter()
        self.data_seconds = 0.0  # spent waiting for data
        for parameter in model.parameters():
            if parameter.requires_grad:  # the last gradient to be computed ends the busy time
                parameter.register_post_accumulate_grad_hook(self._end_busy_time)
        self.busy_times = []  # start and end of each of these steps
        self.nodes = [None] * dist.get_world_size()
        dist.all_gather_object(self.nodes, socket.gethostname())
        if self.is_main:
            log_dir = f"{args.snapshot_path}.logs"
            # Drops the values that a killed run logged after its last snapshot.
            self.writer = SummaryWriter(log_dir, purge_step=self.steps_run + 1)

    def _agree_on_start(self):
        """Exits unless all ranks start at the same position, with the same seed and data size."""
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, (self.epochs_run, self.data_key))
        if len(set(starts)) > 1:
            dist.barrier()  # all ranks leave together
            sys.exit(f"ranks start at {starts}: share the disk (or see own_disks.py), use one seed")

    def _run_batch(self, inputs, targets):
        size = len(inputs)
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.totals[0] += loss.detach() * size
        self.totals[1] += size
        self.samples += len(inputs)
        self.busy_times.append((self.busy_start, self.busy_end))
        self.steps_run += 1
        if self.steps_run % self.args.log_every == 0:
            self._log_metrics(loss)

    def _run_epoch(self, epoch):
        """Trains an epoch to its end and sets `self.loss` to its mean loss per sample."""
        # A resumed run must have the same sample order and dropout as an uninterrupted one.
        self.sampler.set_epoch(epoch)
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        data_start = time.perf_counter()
        self.busy_start = self._now()
        for inputs, targets in self.train_loader:
            self.data_seconds += time.perf_counter() - data_start
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
            data_start = time.perf_counter()
            self.busy_start = self._now()
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / self.totals[1].item()

    def _now(self):
        """Returns the time, or on a GPU an event, which records when the GPU reaches it."""
        if self.device.type == "cpu":
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _end_busy_time(self, parameter):
        self.busy_end = self._now()  # from here on, this rank only waits for the other ranks

    def _busy_ms(self):
        """Returns the median busy time of these steps; the first or a hiccup hardly affects it."""
        if self.device.type == "cpu":
            times = [1000 * (end - start) for start, end in self.busy_times]
        else:
            times = [start.elapsed_time(end) for start, end in self.busy_times]
        self.busy_times.clear()
        return statistics.median(times)

    def _log_metrics(self, loss):
        """Logs metrics of the steps since the last log line, over all ranks."""
        loss = loss.item()  # on a GPU, waits until these steps are done
        seconds = time.perf_counter() - self.start_time
        memory = torch.cuda.max_memory_allocated() or 1024 * getrusage(RUSAGE_SELF).ru_maxrss
        row = [loss, memory, self.data_seconds / seconds, self.samples, self._busy_ms()]
        row = torch.tensor(row, device=self.device)
        rows = [torch.zeros_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        losses, memory, data_shares, samples, busy_ms = torch.stack(rows).T
        slowest = busy_ms.argmax()
        median = busy_ms.median()  # with two ranks, the faster one's
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        metrics = {
            "loss": losses.mean(),
            "gradient_norm": nn.utils.get_total_norm(gradients),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "samples_per_second": samples.sum() / seconds,
            "peak_memory_gb": memory.max() / 1e9,
            "data_share": data_shares.max(),
            "median_rank_ms": median,
            "slowest_rank_ms": busy_ms[slowest],
        }
        if self.is_main:
            for name, value in metrics.items():
                self.writer.add_scalar(name, value, self.steps_run)
            self.writer.flush()  # before the snapshot: a resumed run does not log these steps again
        values = [f"{name} {value:.5g}" for name, value in metrics.items()]
        word = "straggler" if busy_ms[slowest] > 1.1 * median else "slowest"
        rank = f"{word}: rank {slowest} on {self.nodes[slowest]}"
        self._log(" | ".join([f"step {self.steps_run}", *values, rank]))
        self.samples = 0
        self.start_time = time.perf_counter()
        self.data_seconds = 0.0

    def _save_snapshot(self):
        finite = torch.stack([weight.isfinite().all() for weight in self.model.parameters()]).all()
        if not finite:
            sys.exit("cannot save: a weight is nan or inf; lower the learning rate?")
        if not self.is_main:
            return
        snapshot = {
            "model": self.model.module.state_dict(),  # without the DDP wrapper
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
            "steps_run": self.steps_run,
        }
        path = self.args.snapshot_path
        tmp_path = f"{path}.tmp"
        try:
            with open(tmp_path, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            torch.load(tmp_path, map_location="meta", weights_only=True)  # checks that it loads
            os.replace(tmp_path, path)  # atomic: `path` is always a complete snapshot
        except Exception as error:
            sys.exit(f"cannot save {path}: full disk, another run, or not plain numbers? {error!r}")
        trained = f"epoch {self.epochs_run}"
        self._log(f"{trained} | loss {self.loss:.4g} | saved {path}")

    def _load_snapshot(self, source):
        try:
            snapshot = torch.load(source, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
            self.steps_run = snapshot.get("steps_run", self.epochs_run * len(self.train_loader))
        except FileNotFoundError:
            return  # there is no snapshot yet
        except Exception as error:
            sys.exit(f"cannot load {source}: move it or set another --snapshot_path\n{error!r}")

    def _log(self, message):
        if not self.is_main:
            return
        tqdm.write(f"{message}\n", end="")  # one write: processes may share a log

    def train(self):
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
    parser.add_argument("--batch_size", type=positive_int, default=32, help="samples per device")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--log_every", type=positive_int, default=50, help="steps per log line")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    if not args.snapshot_path or not os.access(os.path.dirname(args.snapshot_path) or ".", os.W_OK):
        parser.error(f"cannot write {args.snapshot_path}: create its folder, or set another path")
    return args


@record  # torchrun then shows the traceback of the rank that failed first
def main(args):
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {socket.gethostname()}"
    print(f"{rank} starts: torch {torch.__version__}, {torch.cuda.device_count()} GPUs\n", end="")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{socket.gethostname()} has too few GPUs: lower --nproc_per_node")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    dataset = ToyDataset(2048)
    model = ToyModel().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.MSELoss()
    sampler = DistributedSampler(dataset, seed=args.seed)
    train_loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
    )
    Trainer(model, train_loader, loss_fn, optimizer, device, args).train()
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
