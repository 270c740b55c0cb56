"""Train and check that all ranks agree, with the same command on each node (HOST is one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        recipes/verify.py 50 10

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the file or name another one with --snapshot_path.
To train your own model, replace ToyModel, ToyDataset and the lines of main that build them.
"""

import argparse
import os
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
        generator = torch.Generator().manual_seed(0)  # the same samples each time
        self.inputs = torch.randn(size, 10, generator=generator)
        self.targets = self.inputs @ torch.randn(10, 5, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


POWERS = torch.full((2**20,), 6364136223846793005).cumprod(0)  # of an odd number, modulo 2**64


def digest(tensor, powers=POWERS):
    """Returns a polynomial hash of the bytes of `tensor`, computed where `powers` is."""
    chunks = tensor.detach().flatten().view(torch.uint8).split(len(powers))
    sums = torch.stack([(chunk * powers[: len(chunk)]).sum() for chunk in chunks])
    return (sums * powers[: len(sums)]).sum().item()


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
        self.totals = torch.zeros(2, device=device)  # loss and number of the epoch's samples so far
        self._load_snapshot(args.snapshot_path)
        self._agree_on_start()
        dataset = train_loader.dataset
        some = range(0, len(dataset), len(dataset) // 8 + 1)  # up to eight samples, with targets
        self.data_digest = tuple(digest(torch.as_tensor(part)) for i in some for part in dataset[i])
        self.model = nn.parallel.DistributedDataParallel(model)  # averages gradients

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

    def _run_epoch(self, epoch):
        """Trains an epoch to its end and sets `self.loss` to its mean loss per sample."""
        # A resumed run must have the same sample order and dropout as an uninterrupted one.
        self.sampler.set_epoch(epoch)
        self._verify_split(epoch)
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        steps_run = epoch * len(self.train_loader)
        for step, (inputs, targets) in enumerate(self.train_loader, steps_run + 1):
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
            first = step == steps_run + 1  # of the epoch
            if first or step % self.args.verify_every == 0:
                self._verify(step)
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / self.totals[1].item()

    def _verify_split(self, epoch):
        """Exits if ranks draw the same samples of the epoch."""
        drawn = torch.cat([torch.tensor(index).flatten() for index in self.sampler])
        times = drawn.bincount(minlength=len(self.sampler.dataset)).to(self.device)
        dist.all_reduce(times)  # how often the ranks draw each sample
        several = (times > 1).sum().item()
        if several >= dist.get_world_size():  # fewer may fill the last batch
            sys.exit(f"epoch {epoch}: {several} samples are on several ranks")

    def _verify(self, step):
        """Exits if weights differ between ranks, or if ranks share a random state."""
        powers = POWERS.to(self.device)
        weights = {name: digest(p, powers) for name, p in self.model.module.named_parameters()}
        unique = {"random state": digest(torch.get_rng_state())}
        if self.device.type == "cuda":
            unique["random state of the GPU"] = digest(torch.cuda.get_rng_state())
        weights["what the data set returns"] = self.data_digest
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (weights, unique))
        for name in weights:
            values = [rank_weights.get(name) for rank_weights, _ in gathered]
            if len(set(values)) > 1:
                minority = [r for r, v in enumerate(values) if 2 * values.count(v) <= len(values)]
                sys.exit(f"step {step}: {name} differs on ranks {minority}")
        owners = {}
        for rank, (_, rank_unique) in enumerate(gathered):
            for name, value in rank_unique.items():
                if owners.setdefault(value, rank) != rank:
                    sys.exit(f"step {step}: {name} of rank {rank} is also on rank {owners[value]}")

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
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify_every", type=positive_int, default=100, help="in steps")
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
