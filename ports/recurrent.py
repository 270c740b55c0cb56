"""Train an LSTM language model: torchrun --standalone --nproc_per_node=2 ports/recurrent.py 10"""

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

VOCAB_SIZE = 20
HIDDEN_SIZE = 64
CHUNK = 35  # tokens through which gradients flow back
next_check = 1  # after this step, the ranks ask whether to stop
started_at = time.monotonic()
stop_requested = False


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


def columns_of_rank(tensor):
    """Returns this rank's share of the columns, dimension 1."""
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def gather_columns(tensor):
    """Returns the columns of all ranks; all ranks must call it."""
    shares = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, tensor)
    return torch.cat(shares, dim=1)


class LanguageModel(nn.Module):
    """Maps tokens of shape (time, columns) and a state to scores of the next ones and a state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.lstm = nn.LSTM(HIDDEN_SIZE, HIDDEN_SIZE)
        self.head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE)

    def forward(self, tokens, state):
        outputs, state = self.lstm(self.embedding(tokens), state)
        return self.head(outputs), state


def make_columns(size, columns, seed):
    """Returns a text as columns that are read side by side: inputs and targets, (time, columns)."""
    rules = torch.randint(VOCAB_SIZE, (VOCAB_SIZE,) * 2, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (size,), generator=generator)
    for index in torch.nonzero(torch.rand(size, generator=generator) < 0.9).flatten()[2:]:
        tokens[index] = rules[tokens[index - 2], tokens[index - 1]]  # the others are random
    tokens = tokens[: size // columns * columns].view(columns, -1).t()
    tokens = columns_of_rank(tokens)
    return tokens[:-1], tokens[1:]


def initial_state(tokens):
    return tuple(torch.zeros(2, 1, tokens.shape[1], HIDDEN_SIZE, device=tokens.device))


@torch.no_grad()
def evaluate(model, inputs, targets):
    model.eval()
    scores, _ = model(inputs, initial_state(inputs))
    loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    dist.all_reduce(loss)  # the sum over all ranks, which have as many tokens each
    return loss.item() / dist.get_world_size()


def train(model, train_columns, val_columns, args):
    inputs, targets = train_columns
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    best_loss = float("inf")
    data_key = f"{args.columns} columns of {len(inputs)} tokens"
    epochs_run = 0
    tokens_run = 0  # of each column, in the next epoch
    state = initial_state(inputs)
    step = 0
    if snapshot := load(args.snapshot_path, data_key):
        epochs_run, tokens_run = snapshot["position"]
        state = tuple(columns_of_rank(part).to(inputs.device) for part in snapshot["state"])
        model.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        scheduler.load_state_dict(snapshot["scheduler"])
        best_loss = snapshot["best_loss"]
    model = nn.parallel.DistributedDataParallel(model)

    def save_snapshot():
        snapshot = {
            "position": (epochs_run, tokens_run),
            "data_key": data_key,
            "state": [gather_columns(part) for part in state],
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "best_loss": best_loss,
        }
        save(snapshot, args.snapshot_path)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, request_stop)
    for epoch in range(epochs_run, args.epochs):
        model.train()
        for start in range(tokens_run, len(inputs), CHUNK):
            scores, state = model(inputs[start : start + CHUNK], state)
            state = tuple(part.detach() for part in state)  # no gradient into earlier chunks
            loss = F.cross_entropy(scores.flatten(0, 1), targets[start : start + CHUNK].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            tokens_run = min(start + CHUNK, len(inputs))
            step += 1
            stop = step == next_check and any_rank_stops(inputs.device)
            if stop or step % args.save_every == 0:
                save_snapshot()
            if stop:
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        val_loss = evaluate(model.module, *val_columns)
        scheduler.step(val_loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: val loss {val_loss:.4f}")
        if val_loss < best_loss:
            best_loss = val_loss
            save(model.module.state_dict(), "best.pt")
        epochs_run = epoch + 1
        tokens_run = 0
        state = initial_state(inputs)
        save_snapshot()


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=10)
    parser.add_argument("--columns", type=int, default=20, help="text parts read in parallel")
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
    if args.columns % dist.get_world_size() > 0:
        sys.exit("--columns must be a multiple of the number of ranks")
    torch.manual_seed(0)
    train_columns = [part.to(device) for part in make_columns(20_000, args.columns, seed=1)]
    val_columns = [part.to(device) for part in make_columns(5_000, args.columns, seed=2)]
    train(LanguageModel().to(device), train_columns, val_columns, args)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
