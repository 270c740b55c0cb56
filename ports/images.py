"""Train a classifier of images: torchrun --standalone --nproc_per_node=2 ports/images.py 20"""

import argparse
import contextlib
import os
import random
import signal
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

next_check = 1  # after this step, the ranks ask whether to stop
started_at = time.monotonic()
stop_requested = False


class ResumableSampler(DistributedSampler):
    """Yields this rank's shard of the samples of an epoch, from sample `samples_run` on."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        for start in range(self.samples_run, len(order), self.num_replicas):
            yield order[(start + self.rank) % len(order)]  # pads with the first samples


def request_stop(signum, frame):
    global stop_requested
    stop_requested = True


def any_rank_stops(device):
    """Returns whether a signal has reached any rank. A collective, run about once a second."""
    global next_check
    values = torch.tensor([float(stop_requested), time.monotonic() - started_at], device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    stop, seconds = values.tolist()  # waits for the GPU: too slow for every step
    next_check += min(100, max(1, int(next_check / seconds)))  # steps in about a second
    return stop > 0


def save(state, path):
    """Saves on rank 0, so that `path` is complete at any time; all ranks must call it."""
    if dist.get_rank() == 0:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
        print(f"saved {path}")
    dist.barrier()  # no rank ends before the file is complete


def load(path, data_key):
    """Returns the snapshot that all ranks resume from, or None where there is none yet."""
    snapshot = None
    with contextlib.suppress(FileNotFoundError):  # the only error that means there is none yet
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
    starts = [None] * dist.get_world_size()
    dist.all_gather_object(starts, (snapshot["position"] if snapshot else None, data_key))
    if len(set(starts)) > 1:
        dist.barrier()  # all ranks leave together
        sys.exit(f"ranks start at {starts}: share the disk (or see own_disks.py), use one seed")
    if snapshot and snapshot["data_key"] != data_key:
        sys.exit(f"cannot resume: {path} is of {snapshot['data_key']}, not of {data_key}")
    if snapshot and dist.get_rank() == 0:
        print(f"resumes from {path} at {snapshot['position']}")
    return snapshot


class Images(Dataset):
    """`size` noisy images of shape (1, 8, 8), each with its class, one of 10."""

    def __init__(self, size, seed, augment=False):
        patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.images = patterns[self.labels] + 2 * torch.randn(size, 1, 8, 8, generator=generator)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # shifts it by up to a pixel
            rng = random.Random(f"{self.epoch} {index}")  # the same after a restart
            image = image.roll(rng.randint(-1, 1), 2)
        return image, self.labels[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # all ranks use rank 0's BatchNorm statistics, as saved
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # right answers, all answers
    for images, labels in loader:
        totals[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    dist.all_reduce(totals)  # the sums over all ranks
    return (totals[0] / totals[1]).item()


def train(model, train_loader, val_loader, device, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best_accuracy = 0.0
    sampler = train_loader.sampler
    size = len(train_loader.dataset)
    data_key = f"seed {sampler.seed}, {size} samples"
    epochs_run = 0
    samples_run = 0  # of the next epoch
    step = 0
    if snapshot := load(args.snapshot_path, data_key):
        epochs_run, samples_run = snapshot["position"]
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        scheduler.load_state_dict(snapshot["scheduler"])
        best_accuracy = snapshot["best_accuracy"]
        # A false alarm where a run resumes at its first epoch's end: the steps came before.
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler.step\(\)` before")
    model = nn.parallel.DistributedDataParallel(model)

    def save_snapshot():
        snapshot = {
            "position": (epochs_run, samples_run),
            "data_key": data_key,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "best_accuracy": best_accuracy,
        }
        save(snapshot, args.snapshot_path)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    for epoch in range(epochs_run, args.epochs):
        sampler.set_epoch(epoch)
        sampler.samples_run = samples_run
        train_loader.dataset.epoch = epoch
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples_run = min(samples_run + args.batch_size * dist.get_world_size(), size)
            step += 1
            stop = step == next_check and any_rank_stops(device)
            if stop or step % args.save_every == 0:
                save_snapshot()
            if stop:
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        scheduler.step()
        accuracy = evaluate(model.module, val_loader, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            save(model.module.state_dict(), "best.pt")
        epochs_run = epoch + 1
        samples_run = 0
        save_snapshot()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64, help="samples per rank")
    parser.add_argument("--save_every", type=int, default=100, help="steps per snapshot")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    return parser.parse_args()


def main(args):
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set = Images(1000, 1, augment=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=ResumableSampler(train_set))
    val_set = Images(501, 2)
    val_shard = Subset(val_set, range(dist.get_rank(), len(val_set), dist.get_world_size()))
    val_loader = DataLoader(val_shard, args.batch_size)
    model = make_model().to(device)
    if device.type == "cuda":  # on CPUs, torch has no SyncBatchNorm
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    train(model, train_loader, val_loader, device, args)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
