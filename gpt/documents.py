"""Pretrain a Llama on documents, with the same command on each node (HOST is the name of one):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        gpt/documents.py 50 10 --data FOLDER

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the folder or name another one with --snapshot_path.
It learns the tokens that gpt/prepare_tokens.py has written into the folder after --data.
Each document ends with the token of end_token.txt, and no token attends to another document.
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
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm

SNAPSHOT_NAMES = f"epoch_{4 * '[0-9]'}_sample_{12 * '[0-9]'}"  # a glob pattern
IGNORED = -100  # a target that cross_entropy ignores


def rotate(x, theta):
    """Rotary positions of queries or keys, from and to shape (batch, head, time, head_size)."""
    head_size = x.shape[3]
    frequencies = 1 / theta ** (torch.arange(0, head_size, 2, device=x.device) / head_size)
    positions = torch.arange(x.shape[2], device=x.device)
    angles = torch.outer(positions, frequencies)  # in radians, (time, head_size / 2)
    cos = angles.cos()
    sin = angles.sin()
    first, second = x.chunk(2, dim=3)  # a pair is one channel of each half
    rotated = torch.cat([first * cos - second * sin, first * sin + second * cos], 3)
    return rotated.type_as(x)


def attention_mask(tokens, end_id):
    """Returns a mask: a token attends to those of its own document that do not come after it."""
    documents = F.pad((tokens == end_id).cumsum(1), (1, -1))  # how many ended earlier

    def attends(batch, head, query, key):  # indices; the last two are positions
        return (documents[batch, query] == documents[batch, key]) & (query >= key)

    batch_size, time = tokens.shape
    create = torch.compile(create_block_mask) if tokens.is_cuda else create_mask
    return create(attends, batch_size, None, time, time, tokens.device)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, from and to shape (batch, time, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.rope_theta = config.rope_theta
        kv_size = config.n_kv_head * self.head_size
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, kv_size, bias=False)
        self.v_proj = nn.Linear(config.n_embd, kv_size, bias=False)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, mask):
        heads = (-1, self.head_size)
        q = self.q_proj(x).unflatten(2, heads).transpose(1, 2)  # (batch, n_head, time, head_size)
        k = self.k_proj(x).unflatten(2, heads).transpose(1, 2)  # with n_kv_head heads
        v = self.v_proj(x).unflatten(2, heads).transpose(1, 2)
        q = rotate(q, self.rope_theta)
        k = rotate(k, self.rope_theta)
        if torch.is_tensor(mask):
            attention = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        else:  # a BlockMask
            attention = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return self.o_proj(attention.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """An MLP with a gate (SwiGLU), from and to shape (batch, time, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Causal self-attention and an MLP, from and to shape (batch, time, n_embd)."""

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x, mask):
        x = x + self.self_attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """Maps tokens (batch, time) to logits of each next token, (batch, time, padded vocab)."""

    def __init__(self, config, vocab_size, end_id):
        super().__init__()
        self.shape = f"n_layer={config.n_layer}, n_head={config.n_head}"
        self.shape += f", n_embd={config.n_embd}, context={config.context}"
        self.shape += f", {vocab_size=}"
        self.shape += f", n_kv_head={config.n_kv_head}, n_hidden={config.n_hidden}"
        self.shape += f", rope_theta={config.rope_theta}, norm_eps={config.norm_eps}"
        self.shape += f", tie_word_embeddings={config.tie_word_embeddings}"
        self.context = config.context
        self.recompute = config.recompute
        self.vocab_size = vocab_size
        self.end_id = end_id
        padded_vocab_size = math.ceil(vocab_size / 128) * 128  # which GPUs multiply faster
        self.model = nn.Module()  # the names are those of Llama in transformers
        self.model.embed_tokens = nn.Embedding(padded_vocab_size, config.n_embd)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.model.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, padded_vocab_size, bias=False)
        num_embeddings = padded_vocab_size * config.n_embd
        num_params = sum(p.numel() for p in self.parameters()) - num_embeddings
        attention = 12 * config.n_layer * config.n_embd * config.context
        self.flops_per_token = 6 * num_params + attention  # PaLM, appendix B
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed):
        """Initializes as GPT-2 does: smaller matrices where they add to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # norms multiply by 1
                continue
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * len(self.model.layers))
            # Each matrix has its own seed, letting a rank draw only those it needs, in any order.
            # A CPU draws it, because a GPU's numbers depend on its type (see pytorch#196613).
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            # Each rank draws the whole matrix, equal on any number of ranks, and keeps its shard.
            matrix = torch.empty(parameter.shape).normal_(std=std, generator=generator)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(matrix, mesh, placements, src_data_rank=None))

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        mask = attention_mask(tokens, self.end_id)
        for block in self.model.layers:
            if self.recompute:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.lm_head(self.model.norm(x))

    @torch.no_grad()
    def generate(self, tokenizer, prompt, max_new_tokens):
        """Returns `prompt` and a continuation of `max_new_tokens`, sampled from the model."""
        tokens = torch.tensor([tokenizer.encode(prompt).ids], device=self.lm_head.weight.device)
        for _ in range(max_new_tokens):
            visible = tokens[:, -self.context :]
            length = visible.shape[1]
            padded = F.pad(visible, (0, self.context - length))  # always of the same shape
            logits = self(padded)[0, length - 1, : self.vocab_size]
            next_token = logits.softmax(0).multinomial(1)
            tokens = torch.cat([tokens, next_token[None]], 1)
        return tokenizer.decode(tokens[0].tolist())


class TextDataset(Dataset):
    """Chunks of `context` tokens of a file; a chunk's target is the same chunk one token later."""

    def __init__(self, path, context, vocab_size):
        self.path = path
        self.context = context
        self.vocab_size = vocab_size
        dtype = getattr(torch, path.suffix[1:])  # uint16 or uint32
        size = path.stat().st_size // dtype.itemsize
        self.tokens = torch.from_file(str(path), size=size, dtype=dtype)  # read where it is used

    def __len__(self):
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        tokens = self.tokens[start : start + self.context + 1].long()
        if tokens.max() >= self.vocab_size:
            sys.exit(f"{self.path} has token {tokens.max()}, tokenizer.json only {self.vocab_size}")
        return tokens[:-1], tokens[1:]


def next_token_loss(logits, targets):
    """Returns the mean cross-entropy of logits (batch, time, vocab) and tokens; 0 if ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").mean()


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
        paths = [args.data / "tokenizer.json", *sorted(args.data.glob("*.uint*"))]
        files = [(str(path), path.stat().st_size) for path in paths]
        data = [torch.from_file(name, size=size, dtype=torch.uint8) for name, size in files]
        ends = [(len(file), file[:1024].tolist(), file[-1024:].tolist()) for file in data]
        self.data_key += f" of files {zlib.crc32(str(ends).encode()):08x}"
        self.data_key += f" and documents that end with token {model.end_id}"
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
        self.end_id = model.end_id
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
        self.save_group = dist.new_group(backend="gloo")  # for the thread that saves
        self.pending_save = None
        pin = device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(pin, False, False, pin))  # reuses its memory

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
        loss = torch.zeros((), device=self.device)  # of the batch
        for start in range(0, len(inputs), self.args.micro_batch_size):
            end = start + self.args.micro_batch_size
            micro_inputs = inputs[start:end]
            micro_loss = self.loss_fn(self.model(micro_inputs), targets[start:end])
            micro_loss = micro_loss * len(micro_inputs) / len(inputs)  # a share of the batch's mean
            micro_loss.backward()  # adds to this rank's shards
            loss += micro_loss.detach()
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
        self._wait_for_save()  # an evaluation that fails then loses no training
        self.model.eval()
        total_loss = torch.zeros((), device=self.device)
        for inputs, targets in self.val_loader:
            targets = targets.masked_fill(inputs == self.end_id, IGNORED)
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
            targets = targets.masked_fill(inputs == self.end_id, IGNORED)  # of the next document
            self._run_batch(inputs, targets)
            drawn = self.samples_run + self.train_loader.batch_size * self.sampler.num_replicas
            self.samples_run = min(drawn, len(self.train_loader.dataset))
            self.steps += 1
            if self._steps_done() % self.args.log_every_steps == 0 and self.recent_totals[1] > 0:
                self._log_steps()
            stop = self.steps == self.next_check and self._any_rank_stops()
            if stop or self._steps_done() % self.args.save_every_steps == 0:
                self.loss = self._mean_loss()
                self._save_snapshot()
                self.totals /= dist.get_world_size()  # each rank goes on with its share of the sums
            if stop:
                self._wait_for_save()
                dist.barrier()  # no rank ends before the snapshot is complete
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
        self.loss = self._mean_loss()

    def _mean_loss(self):
        dist.all_reduce(self.totals)  # the sums over all ranks
        return self.totals[0].item() / max(1, self.totals[1].item())  # of skipped steps alone: 0

    def _wait_for_save(self):
        """Waits until `self.snapshot` is complete."""
        try:
            if self.pending_save:
                self.pending_save.result()
        except dcp.CheckpointException as error:
            sys.exit(f"cannot save {self.snapshot}: disk full, used by another run? {error!r:.150}")

    def _save_snapshot(self):
        self._exit_if_gradient_was_bad()
        self._wait_for_save()
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
        keep_every = self.args.keep_every_steps
        is_due = keep_every and self._steps_done() % keep_every == 0
        # The last step of an epoch may have two snapshots: the one within the epoch is marked.
        is_marked = self.samples_run == 0 and self._steps_done() % self.args.save_every_steps == 0
        if self.is_main and is_due and not is_marked:
            with contextlib.suppress(OSError):  # then the save fails as well, and says why
                path.mkdir(parents=True, exist_ok=True)
                (path / "kept").touch()
        self.pending_save = dcp.async_save(
            self._state_dict(),
            checkpoint_id=path,
            process_group=self.save_group,
            async_stager=self.stager,
        )
        self.snapshot = path
        trained = f"epoch {self.epochs_run} + {self.samples_run} samples"
        self._log(f"{trained} | loss {self.loss:.4g} | saving {path}")
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
        self._wait_for_save()
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
    parser.add_argument("--keep_every_steps", type=positive_int, help="steps per kept snapshot")
    parser.add_argument("--log_every_steps", type=positive_int, default=10, help="in steps")
    parser.add_argument("--skip_steps", type=positive_int, nargs="*", default=[], help="numbers")
    parser.add_argument("--eval_every_steps", type=positive_int, default=1000, help="in steps")
    parser.add_argument("--val_tokens", type=int, default=65536, help="taken from the files' ends")
    parser.add_argument("--batch_size", type=positive_int, default=32, help="samples per device")
    parser.add_argument("--micro_batch_size", type=positive_int, default=32, help="in samples")
    parser.add_argument("--data", type=Path, default="tokens", help="from gpt/prepare_tokens.py")
    parser.add_argument("--n_layer", type=positive_int, default=4)
    parser.add_argument("--n_head", type=positive_int, default=2)
    parser.add_argument("--n_kv_head", type=int, default=1, help="heads of keys and values")
    parser.add_argument("--n_embd", type=positive_int, default=128)
    parser.add_argument("--n_hidden", type=int, help="width of an MLP, default: 8/3 of --n_embd")
    parser.add_argument("--rope_theta", type=float, default=1e4, help="base of rotary positions")
    parser.add_argument("--norm_eps", type=float, default=1e-6)
    parser.add_argument("--tie_word_embeddings", action="store_true", help="the head shares them")
    parser.add_argument("--context", type=positive_int, default=64, help="tokens per chunk")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_steps", type=positive_int, help="default: a tenth of training")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak_tflops", type=float, help="TFLOP/s of a device, for the MFU")
    parser.add_argument("--generate", type=int, default=0, help="tokens to generate at the end")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot", help="a folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    if args.n_embd % args.n_head:
        parser.error("--n_head must divide --n_embd")
    if args.n_kv_head < 1 or args.n_head % args.n_kv_head or args.n_embd // args.n_head % 2:
        parser.error("--n_kv_head must divide --n_head, and --n_embd / --n_head be even")
    if args.n_hidden is None:  # 8/3, not 4, because an MLP has three matrices, not two
        args.n_hidden = math.ceil(args.n_embd * 8 / 3 / 128) * 128
    if args.n_hidden < 1 or not 0 < args.rope_theta < math.inf or not 0 < args.norm_eps < math.inf:
        parser.error("--n_hidden must be 1 or more, --rope_theta and --norm_eps more than 0")
    if torch.cuda.is_available() and args.n_embd // args.n_head < 16:
        parser.error("--n_embd / --n_head must be 16 or more for FlexAttention, on GPUs")
    if not 0 < args.learning_rate < math.inf:
        parser.error("--learning_rate must be more than 0")
    if args.generate < 0:
        parser.error("--generate must be 0 or more")
    if args.val_tokens < args.context:
        parser.error("--val_tokens must be at least --context")
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        parser.error("--peak_tflops must be more than 0")
    if not args.snapshot_path or not os.access(os.path.dirname(args.snapshot_path) or ".", os.W_OK):
        parser.error(f"cannot write {args.snapshot_path}: create its folder, or set another path")
    if os.path.isfile(args.snapshot_path) or os.path.isfile(f"{args.snapshot_path}/.metadata"):
        parser.error(f"--snapshot_path {args.snapshot_path} is not a folder of snapshots: name one")
    if args.total_epochs > 9999:
        parser.error("total_epochs must be 9999 or less: names of snapshots have four digits")
    if not (args.data / "tokenizer.json").is_file() or not list(args.data.glob("*.uint*")):
        parser.error(f"no tokens in --data {args.data}: start gpt/prepare_tokens.py first")
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
    try:
        tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        end_token = (args.data / "end_token.txt").read_text().strip()
        end_id = tokenizer.token_to_id(end_token)
        if args.generate > 0 and not tokenizer.encode("\n").ids:
            raise ValueError("it has no token for the end of a line: set --generate 0")
        paths = sorted(args.data.glob("*.uint*"))
        sizes = "".join(f"{path.name} {path.stat().st_size}\n" for path in paths)
        written = args.data / "sizes.txt"  # older folders have none
        if written.exists() and written.read_text() != sizes:
            raise ValueError("files are missing, cut or new: sizes.txt lists what was written")
        files = [TextDataset(path, args.context, vocab_size) for path in paths]
        if files[-1].tokens[-1] != end_id:
            raise ValueError(f"the last document does not end with {end_token}: see end_token.txt")
    except Exception as error:
        sys.exit(f"cannot read --data {args.data}: {error}")
    val_size = math.ceil(args.val_tokens / args.context / len(files))  # chunks of each file
    dataset = ConcatDataset([Subset(file, range(len(file) - val_size)) for file in files])
    val_set = ConcatDataset([Subset(file, range(len(file))[-val_size:]) for file in files])
    if len(dataset) == 0 or len(val_set) < dist.get_world_size():
        chunks = f"{len(dataset)} chunks, and {len(val_set)} for validation"
        sys.exit(f"--data has {chunks}: add text, or change --val_tokens")
    train, val = (len(part) * args.context for part in (dataset, val_set))
    rest = sum(len(file.tokens) for file in files) - train - val  # in no whole chunk
    if dist.get_rank() == 0:
        print(f"{train:,} tokens to train on, {val:,} to validate on, {rest:,} in neither")
    with torch.device("meta"):  # shapes, but no memory
        model = GPT(args, vocab_size, end_id)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    fsdp_config = {"mesh": mesh["dp"]}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        fsdp_config["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, **fsdp_config)
    if not args.tie_word_embeddings:  # else the head is the embedding's matrix
        head = [model.model.norm, model.lm_head]
        fully_shard(head, **fsdp_config, reshard_after_forward=False)
    fully_shard(model, **fsdp_config)
    model.to_empty(device=device)  # memory for this rank's shards
    model.init_weights(args.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # the compiler warns without TF32
        for block in model.model.layers:  # else FlexAttention would keep the scores of all pairs
            block.self_attn.compile(dynamic=False)
    if args.compile:
        torch.set_float32_matmul_precision("high")  # TF32 for products of float32 matrices
        for block in model.model.layers:  # equal blocks share one compilation
            block.compile(dynamic=False)  # else, after a smaller batch, all run code for any size
    optimizer = configure_optimizer(model, args.learning_rate)

    def unpadded_loss(logits, targets):
        return next_token_loss(logits[..., :vocab_size], targets)

    loss_fn = torch.compile(unpadded_loss, dynamic=False) if args.compile else unpadded_loss
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
    val_batch_size = min(args.batch_size, args.micro_batch_size)
    val_loader = DataLoader(val_set, val_batch_size, sampler=val_sampler)
    Trainer(model, train_loader, val_loader, loss_fn, optimizer, device, args).train()
    if args.generate > 0:
        model.eval()  # no dropout
        generated = model.generate(tokenizer, "\n", args.generate)
        if dist.get_rank() == 0:
            print("".join(c for c in generated if c.isprintable() or c == "\n"))  # no escape codes
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
