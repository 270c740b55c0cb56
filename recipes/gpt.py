"""Train a small GPT; on each machine: torchrun --nnodes=2 --nproc_per_node=4 recipes/gpt.py 50 10

Export on each, first, where they meet, HOST being one of them, and a name for the run:
PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=HOST:29400 PET_RDZV_ID=my_run

Trains for 50 epochs and saves a snapshot every 10. Started again, it goes on from the snapshot;
to start afresh, delete the file, or name another one with --snapshot_path.
It learns the bytes of the files after --text. For a model that fills a large GPU: --layers 24
--heads 32 --context 1024 --batch_size 32 --learning_rate 3e-4
"""

import argparse
import math
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import data
from tqdm import tqdm


class Block(nn.Module):
    """Attention, then two linear layers; maps shape (batch, time, 64 * heads) to the same."""

    def __init__(self, heads):
        super().__init__()
        width, self.heads = 64 * heads, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # Queries, keys and values, each of shape (batch, heads, time, 64).
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps bytes of shape (batch, time) to logits of each next byte, (batch, time, 256)."""

    def __init__(self, layers, heads, context):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, 64 * heads), nn.Embedding(context, 64 * heads)
        self.blocks = nn.Sequential(*(Block(heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(64 * heads)
        for weight in (p for p in self.parameters() if p.dim() > 1):
            nn.init.normal_(weight, std=0.02)
        # Floating-point operations a byte, forward and backward (PaLM paper, appendix B).
        weights = sum(p.numel() for p in self.parameters()) - self.places.weight.numel()
        self.flops = 6 * weights + 12 * layers * 64 * heads * context

    def forward(self, text):
        places = self.places.weight[: text.shape[1]]
        x = self.norm(self.blocks(self.bytes(text) + places))
        return nn.functional.linear(x, self.bytes.weight)  # the same weights as at the entrance

    @torch.no_grad()
    def write(self, start, size):
        """Returns text that begins with `start` and goes on with `size` bytes of the model's."""
        text = torch.tensor([list(start.encode())], device=self.norm.weight.device)
        for _ in range(size):
            chances = self.forward(text[:, -len(self.places.weight) :])[0, -1].softmax(0)
            text = torch.cat([text, chances.multinomial(1)[None]], 1)
        return bytes(text[0].tolist()).decode(errors="replace")


class TextDataset(data.Dataset):
    """Windows of `context` bytes of `text`, each with the same one byte later as its target."""

    def __init__(self, text, context):
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        window = self.text[index * self.context :][: self.context + 1].long()
        return window[:-1], window[1:]


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`, from the snapshot on if any.

    A snapshot holds all that is needed to go on: `model` and `optimizer`, their state_dicts, and
    `epochs_run`, the number of epochs done and so the number of the next one, counted from 0.
    """

    def __init__(self, model, train_data, held_out, loss_fn, optimizer, device, args):
        self.model = model
        self.train_data = train_data
        self.held_out = held_out
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0
        if os.path.exists(args.snapshot_path):
            self._load_snapshot(args.snapshot_path)
        self.model = nn.parallel.DistributedDataParallel(model)
        self.is_main = os.environ["RANK"] == "0"  # one process speaks for all
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self.epochs_run, socket.gethostname()))
        (oldest, host), (newest, _) = min(everywhere), max(everywhere)
        if oldest < newest:
            fail(f"{host} starts at epoch {oldest}, not {newest}: share the disk or copy the file")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, self.device.type == "cuda"):
            loss = self.loss_fn(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        """Trains one epoch; `loss` is then the average over it."""
        # The order depends on seed and epoch alone, so that a resumed run repeats it.
        self.train_data.sampler.set_epoch(epoch)
        # So do dropout's random numbers, which are others on each rank.
        torch.manual_seed(hash((self.args.seed, epoch, int(os.environ.get("RANK", 0)))))
        loss = torch.zeros((), device=self.device)
        for step, (inputs, targets) in enumerate(self.train_data, epoch * len(self.train_data)):
            self.optimizer.param_groups[0]["lr"] = self._learning_rate(step)
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss += self._run_batch(inputs, targets)
        dist.all_reduce(loss)  # now the sum over all ranks
        loss /= dist.get_world_size()
        self.loss = loss.item() / len(self.train_data)

    def _learning_rate(self, step):
        """Returns what rises for a tenth of all steps, then falls along a cosine, to a tenth."""
        done = (step + 1) / (self.args.total_epochs * len(self.train_data))
        cosine = 0.55 + 0.45 * math.cos(math.pi * (done - 0.1) / 0.9)
        return self.args.learning_rate * min(10 * done, cosine)

    @torch.no_grad()
    def _held_out_loss(self):
        """Returns the mean over bytes that are never trained on; each rank has a part of them."""
        sums = torch.zeros(2, device=self.device)
        for inputs, targets in self.held_out:
            outputs = self.model.module.forward(inputs.to(self.device)).flatten(0, 1)
            sums[0] += self.loss_fn(outputs, targets.to(self.device).flatten()) * len(inputs)
            sums[1] += len(inputs)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def _save_snapshot(self):
        if not self.is_main:
            return
        snapshot = {
            "model": self.model.module.state_dict(),  # as without DDP
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
        }
        path = self.args.snapshot_path
        part = path + ".tmp"
        try:
            # Never half a snapshot: the old one stays until the new one is complete.
            with open(part, "wb") as file:
                torch.save(snapshot, file)
            os.replace(part, path)
            self._log(f"epoch {self.epochs_run} | loss {self.loss:.4g} | saved {path}")
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch puts its own in front of a full disk's
            fail(f"cannot save {path} ({reason}): make room, or set --snapshot_path")

    def _load_snapshot(self, path):
        try:
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
            fail(f"{path} is no snapshot of this model; move it or set --snapshot_path ({reason})")

    def _log(self, line):
        if not self.is_main:
            return
        tqdm.write(line)

    def train(self):
        done, total = self.epochs_run, self.args.total_epochs
        todo = f"{len(self.train_data)} steps each" if done < total else "ask for more to go on"
        where = f"{self.args.snapshot_path} on {self.device}"
        self._log(f"{where}: {done} of {total} epochs done, {todo}")
        model, sampler, peak = self.model.module, self.train_data.sampler, self.args.peak_gflops
        hidden = None if self.is_main else True  # None: on a terminal only
        bar = tqdm(range(done, total), initial=done, total=total, unit="epoch", disable=hidden)
        for epoch in bar:
            start = time.perf_counter()
            self._run_epoch(epoch)
            speed = sampler.total_size * len(model.places.weight) / (time.perf_counter() - start)
            used = speed * model.flops / dist.get_world_size() / peak / 1e9
            told = f"{speed:,.0f} tokens/s, MFU {used:.1%} of {peak:,} GFLOPS"
            bar.set_postfix_str(f"loss {self.loss:.4g}, {told}")
            self.epochs_run = epoch + 1
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()
                self._log(f"held-out loss {self._held_out_loss():.4g}, {told}")


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
    python = Path(os.__file__).parent.glob("*.py")  # the standard library
    parser.add_argument("--text", nargs="+", type=Path, default=sorted(python), metavar="FILE")
    parser.add_argument("--epoch_steps", type=at_least(1), default=100)
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--heads", type=at_least(1), default=2, help="64 numbers wide, each")
    parser.add_argument("--context", type=at_least(1), default=64, help="in bytes")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    gpu = torch.cuda.is_available()
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument("--peak_gflops", type=at_least(1), default=989_000 if gpu else 100)
    parser.add_argument("--batch_size", type=at_least(1), default=32, help="per device")
    parser.add_argument("--num_workers", type=at_least(0), default=0)
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=at_least(0), default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        fail(f"start it with: {__doc__.splitlines()[0].partition(': ')[2]} (see also its top)")
    try:
        args.text = b"".join(path.read_bytes() for path in args.text)
    except OSError as error:
        fail(f"cannot read --text: {error}")
    if len(args.text) < 65536 + 1000 * args.context:
        fail(f"--text has {len(args.text):,} bytes: needed are 65,536 + 1,000 * --context or more")
    folder = os.path.dirname(os.path.abspath(args.snapshot_path))
    if not os.access(folder, os.W_OK):
        fail(f"cannot write into {folder}: create it, or set --snapshot_path")
    return args


def main(local_rank, args):
    sys.stdout.reconfigure(line_buffering=True)  # a log file, too, shows each line at once
    device = pick_device(local_rank)
    # Our own store and port: torchrun's keeps the addresses of the dead after a restart (2.13).
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) // 2)
    try:
        dist.init_process_group()
    except dist.DistNetworkError:
        fail(f"port {os.environ['MASTER_PORT']} is taken or silent: try another MASTER_PORT")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts on {socket.gethostname()}")
    torch.manual_seed(args.seed)
    dataset = TextDataset(args.text[:-65536], args.context)
    held_out = TextDataset(args.text[-65536:], args.context)
    model = GPT(args.layers, args.heads, args.context).to(device)
    if args.compile:
        torch.set_float32_matmul_precision("high")  # to compile with less gives a warning
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    loss_fn = nn.CrossEntropyLoss()
    sampler = data.DistributedSampler(dataset, seed=args.seed, drop_last=True)
    # An epoch is but a part of a long text, each time another one.
    sampler.num_samples = min(sampler.num_samples, args.epoch_steps * args.batch_size)
    sampler.total_size = sampler.num_samples * dist.get_world_size()
    train_data = data.DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type == "cuda",
    )
    share = data.Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
    held_out = data.DataLoader(share, args.batch_size, num_workers=args.num_workers)
    Trainer(model, train_data, held_out, loss_fn, optimizer, device, args).train()
    if dist.get_rank() == 0:
        print(model.write("\n", 300))
    time.sleep(0.1)  # gloo's threads tidy up: once Python ends, that aborts (torch 2.13)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    main(int(os.environ["LOCAL_RANK"]), args)
