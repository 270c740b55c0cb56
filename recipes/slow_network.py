"""Train a GPT over a slow network, with the same command on each node (HOST is one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        recipes/slow_network.py 50 10 --compress

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the file or name another one with --snapshot_path.
It learns the bytes of the files after --text, by default those of Python's own source code.
"""

import argparse
import math
import os
import socket
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm

HEAD_SIZE = 64
VAL_CHUNKS = 1024  # the end of the text, never trained on


class Block(nn.Module):
    """Causal self-attention and an MLP, from and to shape (batch, time, heads * HEAD_SIZE)."""

    def __init__(self, heads):
        super().__init__()
        width = heads * HEAD_SIZE
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, HEAD_SIZE)).transpose(1, 2)
        q, k, v = qkv.unbind(3)  # each of shape (batch, heads, time, HEAD_SIZE)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps bytes of shape (batch, time) to logits of each next byte, (batch, time, 256)."""

    def __init__(self, layers, heads, context):
        super().__init__()
        width = heads * HEAD_SIZE
        self.context = context
        self.token_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        num_params = sum(p.numel() for p in self.parameters()) - (256 + context) * width
        self.flops_per_token = 6 * num_params + 12 * layers * width * context  # PaLM, appendix B

    @torch.no_grad()
    def init_weights(self, seed):
        """As in GPT-2: random matrices, and smaller ones where they add to the residual stream."""
        generator = torch.Generator(self.head.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # norms multiply by 1
                continue
            std = 0.02
            if name.endswith(("proj.weight", "down.weight")):  # these add to the residual stream
                std /= math.sqrt(2 * len(self.blocks))
            parameter.normal_(std=std, generator=generator)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens):
        """Returns `prompt` and a continuation of `max_new_tokens` bytes, sampled from the model."""
        tokens = torch.tensor([list(prompt.encode())], device=self.head.weight.device)
        for _ in range(max_new_tokens):
            visible = tokens[:, -self.context :]
            length = visible.shape[1]
            padded = F.pad(visible, (0, self.context - length))  # one shape: compiled once
            logits = self(padded)[0, length - 1]
            next_token = logits.softmax(0).multinomial(1)
            tokens = torch.cat([tokens, next_token[None]], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class TextDataset(Dataset):
    """Chunks of `context` bytes of a file; a chunk's target is the same chunk one byte later."""

    def __init__(self, path, context):
        self.path = path
        self.context = context
        self.length = max(0, path.stat().st_size - 1) // context

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with open(self.path, "rb") as file:  # only this chunk is read: a file may be large
            file.seek(index * self.context)
            chunk = file.read(self.context + 1)
        tokens = torch.frombuffer(bytearray(chunk), dtype=torch.uint8).long()
        return tokens[:-1], tokens[1:]


class RandomChunkSampler(DistributedSampler):
    """Yields random chunks for this rank, without end; a permutation of all would take memory."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        while True:  # as many chunks as there are ranks, then the next as many
            chunks = torch.randint(len(self.dataset), (self.num_replicas,), generator=generator)
            yield chunks[self.rank].item()


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`; resumes if a snapshot exists.

    A snapshot holds all that is needed to resume: the state_dicts of `model` and `optimizer`, and
    `epochs_run`, the number of completed epochs and so the index of the next one.
    """

    def __init__(self, model, train_loader, val_loader, loss_fn, optimizer, device, args):
        self.model = model
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.epochs_run = 0
        self.loss = 0.0
        self.steps_per_epoch = min(args.steps_per_epoch, len(train_loader))
        self.use_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if os.path.exists(args.snapshot_path):
            self._load_snapshot(args.snapshot_path)
        self._check_start_epoch()
        self.model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
        if args.compress:
            self.model.register_comm_hook(None, fp16_compress_hook)
        self.is_main = dist.get_rank() == 0  # this process logs and saves

    def _check_start_epoch(self):
        """Exits if the ranks start at different epochs: not all nodes have the newest snapshot."""
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, self.epochs_run)
        if min(starts) < max(starts):
            sys.exit(f"ranks start at epochs {starts}: use a shared disk, or copy the snapshot")

    def _run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.use_bfloat16):
            loss = self.loss_fn(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        """Trains one epoch and sets `self.loss` to its mean loss per sample."""
        # Seeding by epoch gives a resumed run the same sample order and dropout as an unbroken one.
        self.train_loader.sampler.set_epoch(epoch)
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        total_loss = torch.zeros((), device=self.device)
        batches = islice(self.train_loader, self.steps_per_epoch)
        for step, (inputs, targets) in enumerate(batches, epoch * self.steps_per_epoch):
            for group in self.optimizer.param_groups:
                group["lr"] = self._learning_rate(step)
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            loss = self._run_batch(inputs, targets)
            total_loss.add_(loss, alpha=len(inputs))
        dist.all_reduce(total_loss)  # the sum over all ranks
        total_loss /= dist.get_world_size()
        self.loss = total_loss.item() / (self.steps_per_epoch * self.args.batch_size)

    def _learning_rate(self, step):
        """Rises for a tenth of all steps, then falls along a cosine to a tenth of its maximum."""
        progress = (step + 1) / (self.args.total_epochs * self.steps_per_epoch)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9))  # from 1 to 0.1
        return self.args.learning_rate * min(progress / 0.1, cosine)

    @torch.no_grad()
    def _evaluate(self):
        """Returns the mean loss on the validation set, which is sharded over the ranks."""
        totals = torch.zeros(2, device=self.device)
        for inputs, targets in self.val_loader:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.use_bfloat16):
                logits = self.model.module(inputs.to(self.device)).flatten(0, 1)
                loss = self.loss_fn(logits, targets.to(self.device).flatten())
            totals[0] += loss * len(inputs)
            totals[1] += len(inputs)
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()

    def _throughput(self, seconds):
        """Formats an epoch's speed: tokens per second, and the MFU if a peak is given."""
        tokens = self.steps_per_epoch * self.args.batch_size * self.args.context  # of each rank
        throughput = f"{tokens * dist.get_world_size() / seconds:,.0f} tokens/s"
        if self.args.peak_tflops:
            flops_per_second = tokens * self.model.module.flops_per_token / seconds
            throughput += f", MFU {flops_per_second / (self.args.peak_tflops * 1e12):.1%}"
        return throughput

    def _save_snapshot(self):
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
            os.replace(tmp_path, path)  # atomic: `path` is always a complete snapshot
        except (OSError, RuntimeError) as error:
            reason = error.__context__ or error  # torch.save wraps the error of a full disk
            sys.exit(f"cannot save {path} ({reason}): disk full, or file used by another run?")
        self._log(f"epoch {self.epochs_run} | loss {self.loss:.4g} | saved {path}")

    def _load_snapshot(self, path):
        try:
            snapshot = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.epochs_run = snapshot["epochs_run"]
        except Exception as error:
            sys.exit(f"cannot load {path} ({error!r:.150}): move it or set another --snapshot_path")

    def _log(self, message):
        if not self.is_main:
            return
        tqdm.write(message)

    def train(self):
        start_epoch = self.epochs_run
        total = self.args.total_epochs
        steps = self.steps_per_epoch
        location = f"{self.device} of {socket.gethostname()}"
        self._log(f"{start_epoch} of {total} epochs done, {steps} steps per epoch, on {location}")
        if start_epoch >= total:
            self._log("nothing left to train: raise total_epochs, or set another --snapshot_path")
        epochs = range(start_epoch, total)
        disable = None if self.is_main else True  # None: disabled unless on a terminal
        progress = tqdm(epochs, initial=start_epoch, total=total, unit="epoch", disable=disable)
        for epoch in progress:
            start_time = time.perf_counter()
            self._run_epoch(epoch)
            throughput = self._throughput(time.perf_counter() - start_time)
            progress.set_postfix_str(f"loss {self.loss:.4g}, {throughput}")
            self.epochs_run = epoch + 1
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()
                self._log(f"val loss {self._evaluate():.4g}, {throughput}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", nargs="?", type=int, default=50)
    parser.add_argument("save_every", nargs="?", type=int, default=10, help="epochs per snapshot")
    parser.add_argument("--batch_size", type=int, default=32, help="per device")
    stdlib_files = sorted(Path(os.__file__).parent.glob("*.py"))
    parser.add_argument("--text", nargs="+", type=Path, default=stdlib_files, metavar="FILE")
    parser.add_argument("--steps_per_epoch", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=2, help=f"of {HEAD_SIZE} channels each")
    parser.add_argument("--context", type=int, default=64, help="in bytes")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compress", action="store_true", help="all-reduce gradients in float16")
    parser.add_argument("--bucket_cap_mb", type=int, help="size of DDP's buckets (25)")
    parser.add_argument("--peak_tflops", type=float, help="of a device, to log the MFU")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot.pt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if min(args.total_epochs, args.save_every, args.batch_size) < 1:
        parser.error("total_epochs, the save intervals and --batch_size must be 1 or more")
    if min(args.steps_per_epoch, args.layers, args.heads, args.context) < 1:
        parser.error("--steps_per_epoch, --layers, --heads and --context must be 1 or more")
    if args.bucket_cap_mb is not None and args.bucket_cap_mb < 1:
        parser.error("--bucket_cap_mb must be 1 or more")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    snapshot_dir = os.path.dirname(os.path.abspath(args.snapshot_path))
    if not os.access(snapshot_dir, os.W_OK):
        parser.error(f"cannot write into {snapshot_dir}: create it, or set --snapshot_path")
    for path in args.text:
        if not path.is_file() or not os.access(path, os.R_OK):
            parser.error(f"cannot read --text {path}")
    return args


def configure_optimizer(model, learning_rate):
    """AdamW, with weight decay for matrices but not for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


@record  # torchrun then shows the traceback of the rank that failed first
def main(local_rank, args):
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # logs get whole lines at once
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{socket.gethostname()} has too few GPUs: lower --nproc_per_node")
        torch.cuda.set_device(local_rank)  # replaces device_id, which is for GPUs only
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} starts on {socket.gethostname()}")
    torch.manual_seed(args.seed)
    text = ConcatDataset([TextDataset(path, args.context) for path in args.text])
    train_chunks = len(text) - VAL_CHUNKS
    if train_chunks < args.batch_size * dist.get_world_size():
        sys.exit(f"--text has {len(text):,} chunks of {args.context} bytes, too few for one step")
    dataset = Subset(text, range(train_chunks))
    model = GPT(args.layers, args.heads, args.context).to(device)
    model.init_weights(args.seed)
    if args.compile:
        torch.set_float32_matmul_precision("high")  # TF32; without it, the compiler warns
        for block in model.blocks:  # equal blocks share one compilation
            block.compile()
    optimizer = configure_optimizer(model, args.learning_rate)
    loss_fn = nn.CrossEntropyLoss()
    sampler = RandomChunkSampler(dataset, seed=args.seed)
    train_loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        pin_memory=device.type == "cuda",
    )
    val_chunks = range(train_chunks, len(text))
    val_shard = Subset(text, val_chunks[dist.get_rank() :: dist.get_world_size()])
    val_loader = DataLoader(val_shard, args.batch_size, num_workers=args.num_workers)
    Trainer(model, train_loader, val_loader, loss_fn, optimizer, device, args).train()
    if dist.get_rank() == 0:
        print(model.generate("\n", 300))
    time.sleep(0.1)  # CPU only: gloo's threads finish before Python exits (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    args = parse_args()
    main(int(os.environ["LOCAL_RANK"]), args)
