"""Train a GAN that draws points: torchrun --standalone --nproc_per_node=2 ports/gan.py 30"""

import argparse
import contextlib
import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

NOISE_SIZE = 8
CENTERS = torch.tensor([[math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)] for k in range(8)])
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


def make_points(size):
    """Returns points of shape (size, 2), each near one of the centers."""
    generator = torch.Generator().manual_seed(1)
    centers = CENTERS[torch.randint(8, (size,), generator=generator)]
    return centers + 0.05 * torch.randn(size, 2, generator=generator)


def make_model(n_inputs, n_outputs):
    return nn.Sequential(
        nn.Linear(n_inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, n_outputs),
    )


def draw_noise(size, position, device):
    """Returns this rank's rows of a global batch's noise, which its position determines."""
    rng = torch.Generator().manual_seed(position)
    noise = torch.randn(size * dist.get_world_size(), NOISE_SIZE, generator=rng)
    return noise[dist.get_rank() :: dist.get_world_size()].to(device)


@torch.no_grad()
def evaluate(generator, noise):
    """Returns the mean distance of drawn points from the nearest center."""
    distances = torch.cdist(generator(noise), CENTERS.to(noise))
    return distances.min(dim=1).values.mean().item()


def train(generator, discriminator, loader, device, args):
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
    loss_fn = nn.BCEWithLogitsLoss()
    fixed_noise = torch.randn(1000, NOISE_SIZE, device=device)
    sampler = loader.sampler
    size = len(loader.dataset)
    data_key = f"seed {sampler.seed}, {size} samples"
    epochs_run = 0
    samples_run = 0  # of the next epoch
    step = 0
    if snapshot := load(args.snapshot_path, data_key):
        epochs_run, samples_run = snapshot["position"]
        generator.load_state_dict(snapshot["generator"])
        discriminator.load_state_dict(snapshot["discriminator"])
        g_optimizer.load_state_dict(snapshot["g_optimizer"])
        d_optimizer.load_state_dict(snapshot["d_optimizer"])
    generator = nn.parallel.DistributedDataParallel(generator)
    discriminator = nn.parallel.DistributedDataParallel(discriminator)

    def save_snapshot():
        snapshot = {
            "position": (epochs_run, samples_run),
            "data_key": data_key,
            "generator": generator.module.state_dict(),
            "discriminator": discriminator.module.state_dict(),
            "g_optimizer": g_optimizer.state_dict(),
            "d_optimizer": d_optimizer.state_dict(),
        }
        save(snapshot, args.snapshot_path)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    for epoch in range(epochs_run, args.epochs):
        sampler.set_epoch(epoch)
        sampler.samples_run = samples_run
        for points in loader:
            points = points.to(device)
            real = torch.ones(len(points), 1, device=device)
            fake = torch.zeros(len(points), 1, device=device)

            d_optimizer.zero_grad()
            with discriminator.no_sync():  # the next backward pass sums up both
                loss_fn(discriminator(points), real).backward()
            noise = draw_noise(len(points), epoch * size + samples_run, device)
            drawn = generator(noise)
            loss_fn(discriminator(drawn.detach()), fake).backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            loss_fn(discriminator.module(drawn), real).backward()
            g_optimizer.step()
            samples_run = min(samples_run + args.batch_size * dist.get_world_size(), size)
            step += 1
            stop = step == next_check and any_rank_stops(device)
            if stop or step % args.save_every == 0:
                save_snapshot()
            if stop:
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        if dist.get_rank() == 0:
            distance = evaluate(generator.module, fixed_noise)
            print(f"epoch {epoch + 1}: mean distance from a center {distance:.4f}")
        epochs_run = epoch + 1
        samples_run = 0
        save_snapshot()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=30)
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
    points = make_points(2000)
    loader = DataLoader(points, args.batch_size, sampler=ResumableSampler(points))
    generator = make_model(NOISE_SIZE, 2).to(device)
    discriminator = make_model(2, 1).to(device)
    train(generator, discriminator, loader, device, args)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
