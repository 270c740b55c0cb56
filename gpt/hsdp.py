"""Pretrain a GPT with hybrid FSDP, with the same command on each node (HOST is one of them):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        gpt/hsdp.py 50 10

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the folder or name another one with --snapshot_path.
It learns the bytes of the files after --text, by default those of Python's own source code.
"""

import argparse
import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm

SNAPSHOT_NAMES = f"epoch_{4 * '[0-9]'}_sample_{12 * '[0-9]'}"  # a glob pattern


class Block(nn.Module):
    """Causal self-attention and an MLP, from and to shape (batch, time, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(2, (-1, 3, self.head_size)).transpose(1, 2)
        q, k, v = qkv.unbind(3)  # each of shape (batch, n_head, time, head_size)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Maps bytes of shape (batch, time) to logits of each next byte, (batch, time, 256)."""

    def __init__(self, config):
        super().__init__()
        self.shape = f"n_layer={config.n_layer}, n_head={config.n_head}"
        self.shape += f", n_embd={config.n_embd}, context={config.context}"
        self.context = config.context
        self.recompute = config.recompute
        self.token_embedding = nn.Embedding(256, config.n_embd)
        self.position_embedding = nn.Embedding(config.context, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, 256, bias=False)
        num_embeddings = (256 + config.context) * config.n_embd
        num_params = sum(p.numel() for p in self.parameters()) - num_embeddings
        attention = 12 * config.n_layer * config.n_embd * config.context
        self.flops_per_token = 6 * num_params + attention  # PaLM, appendix B

    @torch.no_grad()
    def init_weights(self, seed):
        """Initializes as GPT-2 does: smaller matrices where they add to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # norms multiply by 1
                continue
            std = 0.02
            if name.endswith(("proj.weight", "down.weight")):
                std /= math.sqrt(2 * len(self.blocks))
            # Each matrix has its own seed, letting a rank draw only those it needs, in any order.
            # A CPU draws it, because a GPU's numbers depend on its type (see pytorch#196613).
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            # Each rank draws the whole matrix, equal on any number of ranks, and keeps its shard.
            matrix = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(matrix, mesh, placements, src_data_rank=None))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens):
        """Returns `prompt` and a continuation of `max_new_tokens` bytes, sampled from the model."""
        tokens = torch.tensor([list(prompt.encode())], device=self.head.weight.device)
        for _ in range(max_new_tokens):
            visible = tokens[:, -self.context :]
            length = visible.shape[1]
            padded = F.pad(visible, (0, self.context - length))  # always of the same shape
            logits = self(padded)[0, length - 1]
            next_token = logits.softmax(0).multinomial(1)
            tokens = torch.cat([tokens, next_token[None]], 1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class TextDataset(Dataset):
    """Chunks of `context` bytes of a file; a chunk's target is the same chunk one byte later."""

    def __init__(self, path, context):
        self.path = path
        self.context = context

    def __len__(self):
        return max(0, self.path.stat().st_size - 1) // self.context

    def __getitem__(self, index):
        with open(self.path, "rb") as file:  # only this chunk is read: a file may be large
            file.seek(index * self.context)
            chunk = file.read(self.context + 1)
        tokens = torch.frombuffer(bytearray(chunk), dtype=torch.uint8).long()
        return tokens[:-1], tokens[1:]


def next_byte_loss(logits, targets):
    """Returns the mean cross-entropy of logits (batch, time, 256) and bytes (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class ResumableSampler(DistributedSampler):
    """Yields this rank's shard of the samples of an epoch, from sample `samples_run` on."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        for start in range(self.samples_run, len(order), self.num_replicas):
            yield order[(start + self.rank) % len(order)].item()  # pads with the first samples


class Trainer:
    """Trains `model`, already on `device`, for `args.total_epochs`; resumes if a snapshot exists.

    A snapshot is a folder in which each rank saves its part of `model` and `optimizer`, and
    `epochs_run`, the number of completed epochs, which is the index of the next one.
    The first `samples_run` samples of that epoch are already trained, with mean loss `loss`.
    """

    def __init__(self, model, train_loader, val_loader, loss_fn, optimizer, device, args):
        self.model = model
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.device = device
        self.args = args
        self.sampler = train_loader.sampler
        self.is_main = dist.get_rank() == 0  # logs and saves for all ranks
        self.shape = model.shape
        self.data_key = f"seed {self.sampler.seed}, {len(train_loader.dataset)} samples"
        files = [(str(path), path.stat().st_size) for path in args.text]
        data = [torch.from_file(name, size=size, dtype=torch.uint8) for name, size in files]
        ends = [(len(file), file[:1024].tolist(), file[-1024:].tolist()) for file in data]
        self.data_key += f" of files {zlib.crc32(str(ends).encode()):08x}"
        self.epochs_run = 0
        self.samples_run = 0
        self.loss = 0.0
        self.steps = 0
        self.stop_requested = False
        self.next_check = 1  # step number
        self.started_at = time.monotonic()
        self.first_bad_step = torch.tensor(math.inf, device=device)  # no gradient is nan so far
        self.recent_totals = torch.zeros(2, device=device)  # the same since the last log line
        self.flops_per_token = model.flops_per_token
        self.tokens = 0  # so far, on this rank
        self.start_time = time.perf_counter()
        self._restart_clock()
        self.totals = torch.zeros(2, device=device)  # loss and number of the epoch's samples so far
        self.snapshot = None
        with contextlib.suppress(FileNotFoundError):  # the first run finds no folder
            folders = [f for f in Path(args.snapshot_path).iterdir() if f.match(SNAPSHOT_NAMES)]
            complete = [f for f in folders if ".metadata" in os.listdir(f)]  # it is written last
            self.snapshot = max(complete, default=None)
        self._agree_on_start()
        if self.snapshot:
            self._load_snapshot(self.snapshot)

    def _request_stop(self, signum, frame):
        self.stop_requested = True

    def _any_rank_stops(self):
        """Returns whether a signal has reached any rank. A collective, run about once a second."""
        seconds = time.monotonic() - self.started_at
        values = torch.tensor([float(self.stop_requested), seconds], device=self.device)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        stop, seconds = values.tolist()  # waits for the GPU: too slow for every step
        self.next_check += min(100, max(1, int(self.steps / seconds)))  # steps in about a second
        self._exit_if_gradient_was_bad()
        return stop > 0

    def _exit_if_gradient_was_bad(self):
        step = self.first_bad_step.item()
        if step < math.inf:
            epoch, batch = divmod(int(step) - 1, len(self.train_loader))
            global_size = self.train_loader.batch_size * self.sampler.num_replicas
            skip = f"lower the learning rate, or skip the batch: --skip_steps {step:.0f}"
            skip += f" (after epoch {epoch} + {batch * global_size} samples)"
            sys.exit(f"the gradient of step {step:.0f} is nan or inf: {skip}")

    def _agree_on_start(self):
        """Exits unless all ranks start at the same position, with the same seed and data size."""
        starts = [None] * dist.get_world_size()
        dist.all_gather_object(starts, (self.snapshot and self.snapshot.name, self.data_key))
        if len(set(starts)) > 1:
            dist.barrier()  # all ranks leave together
            sys.exit(f"ranks start at {starts}: share the disk (or see own_disks.py), use one seed")

    def _learning_rate(self):
        """Returns the rate: a warm-up from a tenth of the maximum, then a cosine to a tenth."""
        epochs = self.epochs_run + self.samples_run / len(self.train_loader.dataset)
        progress = epochs / self.args.total_epochs  # from 0 to 1
        warmup = 0.1
        if self.args.warmup_steps:
            warmup = self.args.warmup_steps / (len(self.train_loader) * self.args.total_epochs)
        if progress < warmup:
            return self.args.learning_rate * (0.1 + 0.9 * progress / warmup)
        cosine = 0.55 + 0.45 * math.cos(math.pi * (progress - warmup) / (1 - warmup))
        return self.args.learning_rate * cosine

    def _steps_done(self):
        """Returns the number of steps so far, including those before a restart."""
        global_size = self.train_loader.batch_size * self.sampler.num_replicas
        steps_of_epoch = math.ceil(self.samples_run / global_size)
        return self.epochs_run * len(self.train_loader) + steps_of_epoch

    def _run_batch(self, inputs, targets):
        size = len(inputs)
        step = self._steps_done() + 1
        if step in self.args.skip_steps:
            self._log(f"step {step} skipped")
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.grad_norm = norm.full_tensor()  # a plain tensor, equal on all ranks
        bad_step = torch.where(self.grad_norm.isfinite(), math.inf, step)  # no wait for the GPU
        self.first_bad_step = torch.minimum(self.first_bad_step, bad_step)
        self.optimizer.step()
        self.totals[0] += loss.detach() * size
        self.totals[1] += size
        self.recent_totals[0] += loss.detach() * size
        self.recent_totals[1] += size
        self.tokens += inputs.numel()

    def _log_steps(self):
        """Logs the mean loss since the last log line, and figures of the latest step."""
        dist.all_reduce(self.recent_totals)  # the sums over all ranks
        loss = self.recent_totals[0].item() / self.recent_totals[1].item()
        norm = self.grad_norm.item()
        rate = self.optimizer.param_groups[0]["lr"]
        numbers = f"loss {loss:.4g} | grad norm {norm:.3g} | lr {rate:.3g}"
        speed = self._throughput(self.tokens - self.tokens_before, self.time_before)
        if self.device.type == "cuda":
            speed += f" | peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        self._log(f"step {self._steps_done()} | {numbers} | {speed}")
        self.recent_totals.zero_()
        self._restart_clock()

    @torch.no_grad()
    def _evaluate(self):
        """Logs the mean loss on the validation set, sharded over the ranks."""
        self.model.eval()
        total_loss = torch.zeros((), device=self.device)
        for inputs, targets in self.val_loader:
            loss = self.loss_fn(self.model(inputs.to(self.device)), targets.to(self.device))
            total_loss += loss * len(inputs)
        dist.all_reduce(total_loss)
        val_loss = total_loss.item() / (len(self.val_loader.sampler) * dist.get_world_size())
        self.model.train()
        self._log(f"val loss {val_loss:.4g}")
        self._restart_clock()

    def _restart_clock(self):
        """Excludes the time until now, such as an evaluation's, from the next speed logged."""
        self.tokens_before = self.tokens
        self.time_before = time.perf_counter()

    def _throughput(self, tokens, start_time):
        """Formats tokens per second since `start_time`, and the MFU if a device's peak is given."""
        tokens_per_second = tokens / (time.perf_counter() - start_time)  # of this rank
        throughput = f"{tokens_per_second * dist.get_world_size():,.0f} tokens/s"
        if self.args.peak_tflops:
            flops_per_second = tokens_per_second * self.flops_per_token
            throughput += f", MFU {flops_per_second / (self.args.peak_tflops * 1e12):.1%}"
        return throughput

    def _run_epoch(self, epoch):
        """Trains an epoch to its end and sets `self.loss` to its mean loss per sample."""
        # A resumed run must have the same sample order and dropout as an uninterrupted one.
        self.sampler.set_epoch(epoch)
        self.sampler.samples_run = self.samples_run
        torch.manual_seed(self.args.seed + epoch * dist.get_world_size() + dist.get_rank())
        for inputs, targets in self.train_loader:
            samples_seen = epoch * len(self.train_loader.dataset) + self.samples_run
            if samples_seen > 0 and self._steps_done() % self.args.eval_every_steps == 0:
                self._evaluate()
            for generator in (torch.default_generator, *torch.cuda.default_generators):
                generator.manual_seed(self.args.seed + samples_seen + dist.get_rank())
            inputs = inputs.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            self._run_batch(inputs, targets)
            drawn = self.samples_run + self.train_loader.batch_size * self.sampler.num_replicas
            self.samples_run = min(drawn, len(self.train_loader.dataset))
            self.steps += 1
            if self._steps_done() % self.args.log_every_steps == 0 and self.recent_totals[1] > 0:
                self._log_steps()
            stop = self.steps == self.next_check and self._any_rank_stops()
            if stop or self.steps % self.args.save_every_steps == 0:
                self.loss = self._mean_loss()
                self._save_snapshot()
                self.totals /= dist.get_world_size()  # each rank goes on with its share of the sums
            if stop:
                dist.barrier()  # no rank ends before the snapshot is complete
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / max(1, self.totals[1].item())  # of skipped steps alone: 0

    def _save_snapshot(self):
        self._exit_if_gradient_was_bad()
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in self.model.parameters()]
        finite = torch.stack([weight.isfinite().all() for weight in weights]).all()
        dist.all_reduce(finite, dist.ReduceOp.MIN)  # each rank has different shards
        if not finite:
            sys.exit("cannot save: a weight is nan or inf; lower the learning rate?")
        if self.is_main:
            for folder in set(Path(self.args.snapshot_path).glob(SNAPSHOT_NAMES)) - {self.snapshot}:
                if not {"kept", ".metadata"}.issubset(os.listdir(folder)):  # see keep_snapshots.py
                    shutil.rmtree(folder)  # an older one, or one that a kill has cut short
        name = f"epoch_{self.epochs_run:04}_sample_{self.samples_run:012}"
        path = Path(self.args.snapshot_path, name)
        try:
            dcp.save(self._state_dict(), checkpoint_id=path)
        except dcp.CheckpointException as error:
            sys.exit(f"cannot save {path}: disk full, or file used by another run? {error!r:.150}")
        self.snapshot = path
        trained = f"epoch {self.epochs_run} + {self.samples_run} samples"
        self._log(f"{trained} | loss {self.loss:.4g} | saved {path}")
        self._restart_clock()

    def _state_dict(self):
        """Returns the contents of a snapshot: the tensors in use, not copies of them."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)  # by the weights' names
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer, options=options)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "shape": self.shape,
            "epochs_run": self.epochs_run,
            "samples_run": self.samples_run,
            "data_key": self.data_key,
            "loss": self.loss,
            "totals": self.totals,
        }

    def _load_snapshot(self, source):
        try:
            snapshot = {"shape": ""}
            dcp.load(snapshot, checkpoint_id=source)
            if snapshot["shape"] != self.shape:
                raise ValueError(f"saved by a model of {snapshot['shape']}, not {self.shape}")
            self._state_dict()  # gives the optimizer a state for each weight
            saved = " ".join(dcp.FileSystemReader(source).read_metadata().state_dict_metadata)
            for name, weight in self.model.named_parameters():
                if f".state.{name}." not in saved and self.optimizer.state.pop(weight, None):
                    self._log(f"{source} has no optimizer state of {name}: it had no gradient yet")
            snapshot = self._state_dict()
            if "totals" not in saved:  # saved by version 1.1
                del snapshot["totals"]
            dcp.load(snapshot, checkpoint_id=source)  # into the tensors in use
            self.epochs_run = snapshot["epochs_run"]
            self.samples_run = snapshot.get("samples_run", 0)
            if self.samples_run > 0 and snapshot["data_key"] != self.data_key:
                raise ValueError(f"its epoch has {snapshot['data_key']}, not {self.data_key}")
            if snapshot["data_key"] != self.data_key:
                change = f"{snapshot['data_key']}, now {self.data_key}"
                self._log(f"trained on {change}: the val text may be part of it")
            old = torch.tensor([snapshot.get("loss", 0.0), 1.0]) * self.samples_run  # version 1.1
            self.totals.copy_(snapshot.get("totals", old) / dist.get_world_size())
        except (Exception, dcp.CheckpointException) as error:
            sys.exit(f"cannot load {source}: move it or set another --snapshot_path\n{error!r}")

    def _log(self, message):
        if not self.is_main:
            return
        tqdm.write(f"{message}\n", end="")  # one write: processes may share a log

    def train(self):
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._request_stop)
        total = self.args.total_epochs
        steps = f"{len(self.train_loader)} steps per epoch"
        self._log(f"{self.epochs_run} of {total} epochs done, {steps}, on {self.device}")
        past = [step for step in self.args.skip_steps if step <= self._steps_done()]
        restarts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
        if past and not any(int(os.environ.get(name, 0)) for name in restarts):
            sys.exit(f"--skip_steps {past}: {self._steps_done()} steps are done: name later ones")
        if self.epochs_run >= total:
            self._log("nothing left to train: raise total_epochs, or set another --snapshot_path")
        epochs = range(self.epochs_run, total)
        progress = tqdm(epochs, unit="epoch", disable=None if self.is_main else True)
        for epoch in progress:
            self._run_epoch(epoch)
            progress.set_postfix(loss=f"{self.loss:.4g}")
            self.epochs_run = epoch + 1
            self.samples_run = 0
            self.totals.zero_()
            if self.epochs_run % self.args.save_every == 0 or self.epochs_run == total:
                self._save_snapshot()
        self._evaluate()
        throughput = self._throughput(self.tokens, self.start_time)
        self._log(f"{throughput} in all, with evaluations and snapshots")


def positive_int(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("total_epochs", nargs="?", type=positive_int, default=50)
    parser.add_argument("save_every", nargs="?", type=positive_int, default=10, help="in epochs")
    parser.add_argument("--save_every_steps", type=positive_int, default=100, help="in steps")
    parser.add_argument("--log_every_steps", type=positive_int, default=10, help="in steps")
    parser.add_argument("--skip_steps", type=positive_int, nargs="*", default=[], help="numbers")
    parser.add_argument("--eval_every_steps", type=positive_int, default=1000, help="in steps")
    parser.add_argument("--val_tokens", type=int, default=65536, help="taken from the files' ends")
    parser.add_argument("--batch_size", type=positive_int, default=32, help="samples per device")
    stdlib_files = sorted(Path(os.__file__).parent.glob("*.py"))
    parser.add_argument("--text", nargs="+", type=Path, default=stdlib_files, metavar="FILE")
    parser.add_argument("--n_layer", type=positive_int, default=4)
    parser.add_argument("--n_head", type=positive_int, default=2)
    parser.add_argument("--n_embd", type=positive_int, default=128)
    parser.add_argument("--context", type=positive_int, default=64, help="bytes per chunk")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_steps", type=positive_int, help="default: a tenth of training")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak_tflops", type=float, help="TFLOP/s of a device, for the MFU")
    parser.add_argument("--generate", type=int, default=0, help="bytes to generate at the end")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot", help="a folder")
    ranks_of_a_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    parser.add_argument("--shard_size", type=int, default=ranks_of_a_node, help="devices per copy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    if args.n_embd % args.n_head:
        parser.error("--n_head must divide --n_embd")
    if not 0 < args.learning_rate < math.inf:
        parser.error("--learning_rate must be more than 0")
    if args.generate < 0:
        parser.error("--generate must be 0 or more")
    if args.val_tokens < args.context:
        parser.error("--val_tokens must be at least --context")
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        parser.error("--peak_tflops must be more than 0")
    for path in args.text:
        if not path.is_file() or not os.access(path, os.R_OK):
            parser.error(f"cannot read --text {path}")
    if not args.snapshot_path or not os.access(os.path.dirname(args.snapshot_path) or ".", os.W_OK):
        parser.error(f"cannot write {args.snapshot_path}: create its folder, or set another path")
    if os.path.isfile(args.snapshot_path) or os.path.isfile(f"{args.snapshot_path}/.metadata"):
        parser.error(f"--snapshot_path {args.snapshot_path} is not a folder of snapshots: name one")
    if args.total_epochs > 9999:
        parser.error("total_epochs must be 9999 or less: names of snapshots have four digits")
    return args


def configure_optimizer(model, learning_rate):
    """AdamW, with weight decay for matrices but not for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, learning_rate, betas=(0.9, 0.95), fused=True)


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
    files = [TextDataset(path, args.context) for path in args.text]
    val_size = math.ceil(args.val_tokens / args.context / len(files))  # chunks of each file
    dataset = ConcatDataset([Subset(file, range(len(file) - val_size)) for file in files])
    val_set = ConcatDataset([Subset(file, range(len(file))[-val_size:]) for file in files])
    if len(dataset) == 0 or len(val_set) < dist.get_world_size():
        chunks = f"{len(dataset)} chunks, and {len(val_set)} for validation"
        sys.exit(f"--text has {chunks}: add text, or change --val_tokens")
    train, val = (len(part) * args.context for part in (dataset, val_set))
    rest = sum(file.path.stat().st_size for file in files) - train - val  # in no whole chunk
    if dist.get_rank() == 0:
        print(f"{train:,} tokens to train on, {val:,} to validate on, {rest:,} in neither")
    with torch.device("meta"):  # shapes, but no memory
        model = GPT(args)
    shard_sizes = [None] * dist.get_world_size()
    dist.all_gather_object(shard_sizes, args.shard_size)
    if len(set(shard_sizes)) > 1:
        sys.exit(f"nodes of unequal size: set --shard_size, which is {shard_sizes} by default")
    if args.shard_size < 1 or dist.get_world_size() % args.shard_size:
        sys.exit(f"--shard_size {args.shard_size} does not divide {dist.get_world_size()} ranks")
    mesh_shape = (dist.get_world_size() // args.shard_size, args.shard_size)
    mesh = init_device_mesh(device.type, mesh_shape, mesh_dim_names=("replicate", "shard"))
    fsdp_config = {"mesh": mesh}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        fsdp_config["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **fsdp_config)
    fully_shard([model.norm, model.head], **fsdp_config, reshard_after_forward=False)
    fully_shard(model, **fsdp_config)
    model.to_empty(device=device)  # memory for this rank's shards
    model.init_weights(args.seed)
    if args.compile:
        torch.set_float32_matmul_precision("high")  # TF32 for products of float32 matrices
        for block in model.blocks:  # equal blocks share one compilation
            block.compile(dynamic=False)  # else, after a smaller batch, all run code for any size
    optimizer = configure_optimizer(model, args.learning_rate)
    loss_fn = torch.compile(next_byte_loss, dynamic=False) if args.compile else next_byte_loss
    sampler = ResumableSampler(dataset, seed=args.seed)
    train_loader = DataLoader(
        dataset,
        args.batch_size,
        sampler=sampler,
        num_workers=args.num_workers,
        multiprocessing_context="fork" if args.num_workers > 0 else None,
        worker_init_fn=lambda worker_id: os.setsid(),  # torchrun signals the process group
        pin_memory=device.type == "cuda",
    )
    val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)  # repeats none
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_sampler)
    Trainer(model, train_loader, val_loader, loss_fn, optimizer, device, args).train()
    if args.generate > 0:
        model.eval()  # no dropout
        generated = model.generate("\n", args.generate)
        if dist.get_rank() == 0:
            print("".join(c for c in generated if c.isprintable() or c == "\n"))  # no escape codes
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
