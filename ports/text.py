"""Train a model of words: torchrun --standalone --nproc_per_node=2 ports/text.py 200"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

SYLLABLES = ["ba", "de", "fi", "go", "ku", "lat", "men", "nir", "pos", "rut", "sam", "ten"]
LETTERS = "_.abcdefghijklmnopqrstuvwxyz"  # "." starts and ends a word
PADDING = LETTERS.index("_")
next_check = 1  # after this step, the ranks ask whether to stop
started_at = time.monotonic()
stop_requested = False


class EndlessSampler(DistributedSampler):
    """Yields this rank's shard of endless epochs, starting at sample `samples_run` of all."""

    def __iter__(self):
        size = len(self.dataset)
        epoch = -1
        for sample in itertools.count(self.samples_run + self.rank, self.num_replicas):
            if sample // size > epoch:
                epoch = sample // size
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(size, generator=generator).tolist()
            yield order[sample % size]


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


def make_words(size, seed):
    """Returns words of 1 to 8 syllables, each a tensor of the numbers of its letters."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 8))) for _ in range(size)]
    return [torch.tensor([LETTERS.index(letter) for letter in f".{word}."]) for word in words]


def collate(words):
    """Pads words to one length; returns inputs and targets of shape (batch, length)."""
    padded = pad_sequence(words, batch_first=True, padding_value=PADDING)
    return padded[:, :-1], padded[:, 1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, len(LETTERS))

    def forward(self, inputs):
        hidden, _ = self.rnn(self.embedding(inputs))
        return self.head(hidden).transpose(1, 2)  # (batch, letters, length), for cross_entropy


def masked_loss(logits, targets, reduction="mean"):
    return F.cross_entropy(logits, targets, ignore_index=PADDING, reduction=reduction)


@torch.no_grad()
def evaluate(model, loader, device):
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, letters
    for inputs, targets in loader:
        totals[0] += masked_loss(model(inputs.to(device)), targets.to(device), "sum")
        totals[1] += (targets != PADDING).sum()
    dist.all_reduce(totals)  # the sums over all ranks
    return (totals[0] / totals[1]).item()


def train(model, train_loader, val_loader, device, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = train_loader.sampler
    data_key = f"seed {sampler.seed}, {len(train_loader.dataset)} samples"
    steps_run = 0
    samples_run = 0  # in these steps, on all ranks
    if snapshot := load(args.snapshot_path, data_key):
        steps_run, samples_run = snapshot["position"]
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
    model = nn.parallel.DistributedDataParallel(model)

    def save_snapshot():
        snapshot = {
            "position": (steps_run, samples_run),
            "data_key": data_key,
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        save(snapshot, args.snapshot_path)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    sampler.samples_run = samples_run
    batches = iter(train_loader)
    start_step = steps_run
    for step in range(steps_run, args.steps + 1):
        if step % args.eval_every == 0:
            val_loss = evaluate(model.module, val_loader, device)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {val_loss:.4f}")
        if step == args.steps:
            break
        inputs, targets = next(batches)
        loss = masked_loss(model(inputs.to(device)), targets.to(device), "sum")
        n_letters = (targets != PADDING).sum().to(device)
        dist.all_reduce(n_letters)  # of the global batch
        loss = loss / n_letters * dist.get_world_size()  # DDP averages over ranks
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps_run = step + 1
        samples_run += args.batch_size * dist.get_world_size()
        stop = steps_run - start_step == next_check and any_rank_stops(device)
        if stop or steps_run % args.save_every == 0 or steps_run == args.steps:
            save_snapshot()
        if stop:
            dist.destroy_process_group()
            sys.exit("stopped by a signal")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=64, help="samples per rank")
    parser.add_argument("--eval_every", type=int, default=50, help="steps per evaluation")
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
    train_set = make_words(2048, 1)
    sampler = EndlessSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, collate_fn=collate)
    val_set = make_words(501, 2)
    val_shard = val_set[dist.get_rank() :: dist.get_world_size()]
    val_loader = DataLoader(val_shard, args.batch_size, collate_fn=collate)
    train(Model().to(device), train_loader, val_loader, device, args)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
