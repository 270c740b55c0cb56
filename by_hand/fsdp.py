"""Train with FSDP by hand: torchrun --standalone --nproc_per_node=2 by_hand/fsdp.py 50 10

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
from torch.nn import functional as F
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


def split(tensor):
    """Returns a tensor's elements as one row per rank, padded with zeros at the end."""
    padding = -tensor.numel() % dist.get_world_size()
    return F.pad(tensor.flatten(), (0, padding)).view(dist.get_world_size(), -1)


def join(rows, parameter):
    """Returns all rows as one tensor of the parameter's shape, without the padding."""
    return rows.flatten()[: parameter.numel()].view_as(parameter)


def gather(shard, parameter):
    """On rank 0, returns the whole tensor; on the other ranks, their shard."""
    if shard.dim() == 0:  # such as AdamW's step count, the same on all ranks
        return shard
    if dist.get_rank() > 0:
        dist.gather(shard)
        return shard
    rows = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.gather(shard, rows)
    return join(torch.stack(rows), parameter).cpu()  # a GPU may not hold all of them


class Bucket:
    """A layer's parameters, of which each rank keeps a shard; it gathers them for each pass."""

    def __init__(self, layer):
        self.parameters = list(layer.parameters())
        self.rows = [split(parameter.detach()) for parameter in self.parameters]
        self.shards = [nn.Parameter(rows[dist.get_rank()].clone()) for rows in self.rows]
        self.ready = 0  # how many gradients backward() has computed since the last step
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            parameter.data = join(rows, parameter)  # in memory that is freed between passes
            parameter.register_post_accumulate_grad_hook(self.note_gradient)
        self.free_weights()
        layer.register_forward_pre_hook(self.gather_weights)
        layer.register_forward_hook(self.end_forward)

    def end_forward(self, layer, inputs, output):
        self.free_weights()
        if output.requires_grad:
            output.register_hook(self.gather_weights)  # before the layer's backward pass

    def gather_weights(self, *_):
        for rows, shard in zip(self.rows, self.shards, strict=True):
            rows.untyped_storage().resize_(rows.nbytes)
            dist.all_gather(list(rows), shard.detach())

    def free_weights(self):
        for rows in self.rows:
            rows.untyped_storage().resize_(0)

    def note_gradient(self, parameter):
        self.ready += 1
        if self.ready == len(self.parameters):
            rows = torch.cat([split(p.grad) for p in self.parameters], dim=1)
            for p in self.parameters:
                p.grad = None  # a copy of it is in the rows
            self.flat = torch.empty_like(rows[0])  # receives the sum of this rank's row
            dist.reduce_scatter(self.flat, list(rows))
            self.free_weights()

    def average_gradients(self):
        if self.ready != len(self.parameters):
            raise RuntimeError("between two steps, each parameter must get one gradient")
        self.flat /= dist.get_world_size()
        sizes = [shard.numel() for shard in self.shards]
        for shard, gradient in zip(self.shards, self.flat.split(sizes), strict=True):
            shard.grad = gradient
        self.ready = 0


class FullyShardedDataParallel(nn.Module):
    """Gathers the weights of each layer of `module` when they are needed, as torch's FSDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        layers = [layer for layer in module.children() if list(layer.parameters())]
        num_sharded = sum(len(list(layer.parameters())) for layer in layers)
        if not num_sharded == len(list(module.parameters())) == len(module.state_dict()):
            sys.exit("each weight must be in one layer, and a buffer in none: not supported")
        self.buckets = [Bucket(layer) for layer in layers]
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards]

    def forward(self, *inputs):
        return self.module(*inputs)

    def average_gradients(self):
        for bucket in self.buckets:
            bucket.average_gradients()


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
        self.epochs_run = 0
        self.totals = torch.zeros(2, device=device)  # loss and number of the epoch's samples so far
        self._load_snapshot(args.snapshot_path)

    def _run_batch(self, inputs, targets):
        size = len(inputs)
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        self.model.average_gradients()
        self.optimizer.step()
        self.totals[0] += loss.detach() * size
        self.totals[1] += size

    def _run_epoch(self, epoch):
        """Trains an epoch to its end and sets `self.loss` to its mean loss per sample."""
        # A resumed run must have the same sample order and dropout as an uninterrupted one.
        self.sampler.set_epoch(epoch)
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        for inputs, targets in self.train_loader:
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / self.totals[1].item()

    def _save_snapshot(self):
        weights = self.model.shards
        finite = torch.stack([weight.isfinite().all() for weight in weights]).all()
        dist.all_reduce(finite, dist.ReduceOp.MIN)  # each rank has different shards
        if not finite:
            sys.exit("cannot save: a weight is nan or inf; lower the learning rate?")
        model_state = self._whole_model_state()  # a collective; only rank 0 gets all of it
        optimizer_state = self._whole_optimizer_state()
        if not self.is_main:
            return
        snapshot = {
            "model": model_state,
            "optimizer": optimizer_state,
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

    def _whole_model_state(self):
        state_dict = self.model.module.state_dict()  # only the shapes are valid
        for name, shard in zip(state_dict, self.model.shards, strict=True):
            state_dict[name] = gather(shard.detach(), state_dict[name])
        return state_dict

    def _whole_optimizer_state(self):
        state_dict = self.optimizer.state_dict()
        parameters = dict(zip(self.model.shards, self.model.module.parameters(), strict=True))
        shards = [shard for group in self.optimizer.param_groups for shard in group["params"]]
        for number, state in state_dict["state"].items():
            parameter = parameters[shards[number]]
            whole = {name: gather(value, parameter) for name, value in state.items()}
            state_dict["state"][number] = whole
        return state_dict

    def _load_snapshot(self, source):
        try:
            snapshot = torch.load(source, map_location="cpu", weights_only=True)
            for weight, shard in zip(snapshot["model"].values(), self.model.shards, strict=True):
                shard.data.copy_(split(weight)[dist.get_rank()])
            for state in snapshot["optimizer"]["state"].values():
                for name, value in state.items():
                    if value.dim() > 0:
                        state[name] = split(value)[dist.get_rank()].clone()
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
    model = FullyShardedDataParallel(ToyModel().to(device))
    optimizer = torch.optim.SGD(model.shards, lr=0.01, momentum=0.9)
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
