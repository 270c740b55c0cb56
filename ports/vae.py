"""Train a variational autoencoder while nodes come and go (HOST is the name of one of them):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:3 --nproc_per_node=2 --max-restarts=100 \
        --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 ports/vae.py 20
"""

import argparse
import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

N_LATENT = 4
next_check = 1  # after this step, the ranks ask whether to stop
started_at = time.monotonic()
stop_requested = False


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


def make_images(size, seed):
    """Returns images of shape (size, 64): a bright square of 4 x 4 pixels somewhere in 8 x 8."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(size, 8, 8)
    for image in images:
        top, left = torch.randint(5, (2,), generator=generator).tolist()
        image[top : top + 4, left : left + 4] = 1
    return images.flatten(1)


def draw_noise(global_size, position, device):
    """Returns this rank's rows of a global batch's noise, which its position determines."""
    rng = torch.Generator().manual_seed(position)
    noise = torch.randn(global_size, N_LATENT, generator=rng)
    shard = noise[dist.get_rank() :: dist.get_world_size()]
    return (shard if len(shard) > 0 else noise[:1]).to(device)


def gather_codes(codes, global_size):
    """Returns the codes of the global batch; gradients flow to this rank's only."""
    shard = slice(dist.get_rank(), None, dist.get_world_size())
    gathered = torch.zeros(global_size, N_LATENT).to(codes)
    gathered[shard] = codes.detach()
    dist.all_reduce(gathered)
    gathered[shard] = codes
    return gathered


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * N_LATENT))
        self.decoder = nn.Sequential(nn.Linear(N_LATENT, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images, noise):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        codes = mean + noise * (log_var / 2).exp()
        return self.decoder(codes), mean, log_var, codes


def reconstruction_error(logits, images):
    return F.binary_cross_entropy_with_logits(logits, images, reduction="sum")


def kl_divergence(mean, log_var):
    return -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()


def correlation(codes):
    """Returns how far a batch's codes are from uncorrelated, as in DIP-VAE."""
    covariance = codes.T @ codes / len(codes)
    return (covariance - torch.eye(N_LATENT).to(codes)).square().sum()


@torch.no_grad()
def evaluate(model, images):
    """Returns the mean reconstruction error of an image, from the mean of its code."""
    mean, _ = model.encoder(images).chunk(2, dim=1)
    return reconstruction_error(model.decoder(mean), images).item() / len(images)


def train(model, train_loader, val_images, device, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = train_loader.batch_sampler
    size = len(train_loader.dataset)
    data_key = f"seed {sampler.seed}, {size} samples"
    epochs_run = 0
    samples_run = 0  # of the next epoch
    step = 0
    if snapshot := load(args.snapshot_path, data_key):
        epochs_run, samples_run = snapshot["position"]
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    model = nn.parallel.DistributedDataParallel(model)

    def save_snapshot():
        snapshot = {
            "position": (epochs_run, samples_run),
            "data_key": data_key,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        save(snapshot, args.snapshot_path)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    for epoch in range(epochs_run, args.epochs):
        sampler.set_epoch(epoch)
        sampler.samples_run = samples_run
        for images in train_loader:
            global_size = min(args.batch_size, size - samples_run)
            local_size = len(range(dist.get_rank(), global_size, dist.get_world_size()))  # may be 0
            images = images.to(device)
            outputs = model(images, draw_noise(global_size, epoch * size + samples_run, device))
            logits, mean, log_var, codes = (output[:local_size] for output in outputs)
            loss = reconstruction_error(logits, images[:local_size]) + kl_divergence(mean, log_var)
            loss = loss / global_size + correlation(gather_codes(codes, global_size))
            loss = loss * dist.get_world_size()  # DDP averages over ranks
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples_run += global_size
            step += 1
            stop = step == next_check and any_rank_stops(device)
            if stop or step % args.save_every == 0:
                save_snapshot()
            if stop:
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: error {evaluate(model.module, val_images):.4f}")
        epochs_run = epoch + 1
        samples_run = 0
        save_snapshot()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64, help="samples on all ranks together")
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
    train_set = make_images(1025, 1)
    sampler = ResumableSampler(train_set)
    sampler.global_batch_size = args.batch_size
    train_loader = DataLoader(train_set, batch_sampler=sampler)
    val_images = make_images(501, 2).to(device)
    train(VAE().to(device), train_loader, val_images, device, args)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
