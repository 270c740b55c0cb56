"""Finetune a Hugging Face model on chats, with the same command on each node (HOST is one):

    torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=HOST:29400 \
        gpt/finetune_chat.py 50 10 --model FOLDER --text FILE

Trains for 50 epochs and saves a snapshot every 10. Started again, it resumes from the snapshot;
to start afresh, delete the folder or name another one with --snapshot_path.
It learns the last message of each chat, and exports the model to --export_path. Each line of the
files after --text is a chat: {"messages": [{"role": "user", "content": "Hello!"}, ...]}
"""

import argparse
import contextlib
import json
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
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SNAPSHOT_NAMES = f"epoch_{4 * '[0-9]'}_sample_{12 * '[0-9]'}"  # a glob pattern
IGNORED = -100  # a target that cross_entropy ignores


class ChatDataset(Dataset):
    """Chats, padded or cut to `context` tokens; the targets are those of the last message."""

    def __init__(self, path, context, tokenizer):
        self.chats = []
        self.context = context
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        self.chats.append(self._tokenize(json.loads(line), tokenizer))
                except Exception as error:
                    sys.exit(f"--text {path}, line {number}: not a chat of texts: {error!r:.300}")

    def _tokenize(self, chat, tokenizer):
        """Returns a chat's tokens, and how many of them come before its answer."""
        *messages, answer = chat["messages"]
        content = str.strip(answer.get("content") or "")
        if answer["role"] != "assistant" or not content or answer.get("weight") == 0:
            raise ValueError("it must end with a text of the assistant whose weight is not 0")
        line = json.dumps(chat, ensure_ascii=False)
        raw = tokenizer(line, split_special_tokens=True, verbose=False)  # <|...|> is plain text
        if raw != tokenizer(line, verbose=False):
            raise ValueError("no text may have special tokens")
        options = {"tools": chat.get("tools"), "tokenize": False}
        text = tokenizer.apply_chat_template([*messages, answer], **options)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
        if lost := [said for said in self._said(chat) if said not in text]:
            raise ValueError(f"the template leaves out or changes {lost[0]!r}")
        encoded = tokenizer([text, prompt], add_special_tokens=False, verbose=False)
        tokens, prompt_tokens = encoded.input_ids
        if tokens[: len(prompt_tokens)] != prompt_tokens:  # such as if it opens <think>
            raise ValueError(f"the template's prompt {prompt[-40:]!r} does not begin {text!r}")
        return torch.tensor(tokens), len(prompt_tokens)

    def _said(self, chat):
        """Returns what a template must write unchanged; what a tool returns, it may encode."""
        texts = [str.strip(m.get("content") or "") for m in chat["messages"] if m["role"] != "tool"]
        calls = [call for message in chat["messages"] for call in message.get("tool_calls") or []]
        functions = [part.get("function", part) for part in calls + (chat.get("tools") or [])]
        names = [function["name"] for function in functions]
        arguments = [f["arguments"] for f in functions if isinstance(f.get("arguments"), str)]
        return texts + names + arguments

    def __len__(self):
        return len(self.chats)

    def __getitem__(self, index):
        tokens, prompt_length = self.chats[index]
        targets = tokens.clone()
        targets[:prompt_length] = IGNORED
        padding = (0, self.context + 1 - len(tokens))  # a negative number cuts
        return F.pad(tokens, padding)[:-1], F.pad(targets, padding, value=IGNORED)[1:]


def next_token_loss(logits, targets):
    """Returns the sum of the cross-entropies of the tokens that are not ignored."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


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
        self.shape = f"{model.config.num_hidden_layers=}, {model.config.num_attention_heads=}"
        self.data_key = f"seed {self.sampler.seed}, {len(train_loader.dataset)} samples"
        files = [(str(path), path.stat().st_size) for path in args.text]
        data = [torch.from_file(name, size=size, dtype=torch.uint8) for name, size in files]
        ends = [(len(file), file[:1024].tolist(), file[-1024:].tolist()) for file in data]
        self.data_key += f" of files {zlib.crc32(str(ends).encode()):08x}"
        paths = [args.model / "config.json", *sorted(args.model.glob("*.safetensors"))]
        paths += sorted([*args.model.glob("*token*"), *args.model.glob("*.jinja")])
        files = [(str(path), path.stat().st_size) for path in paths]
        data = [torch.from_file(name, size=size, dtype=torch.uint8) for name, size in files]
        ends = [(file[:65536].tolist(), file[-1024:].tolist()) for file in data]
        self.model_key = f"config, weights and tokenizer {zlib.crc32(str(ends).encode()):08x}"
        self.epochs_run = 0
        self.samples_run = 0
        self.loss = 0.0
        self.steps = 0
        self.stop_requested = False
        self.next_check = 1  # step number
        self.started_at = time.monotonic()
        self.first_bad_step = torch.tensor(math.inf, device=device)  # no gradient is nan so far
        self.recent_totals = torch.zeros(2, device=device)  # the same since the last log line
        weights = dict(model.named_parameters(remove_duplicate=False))  # a tied head has two names
        del weights["model.embed_tokens.weight"]  # looked up; a head has a different name
        flops = [(6 if w.requires_grad else 2) * w.numel() for w in weights.values()]
        self.flops_per_token = sum(flops)  # attention left out
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
        num_tokens = (targets != IGNORED).sum()
        dist.all_reduce(num_tokens)  # of all micro-batches of all ranks
        loss = torch.zeros((), device=self.device)  # of the batch
        for start in range(0, len(inputs), self.args.micro_batch_size):
            end = start + self.args.micro_batch_size
            micro_inputs = inputs[start:end]
            logits = self.model(micro_inputs, use_cache=False).logits
            micro_loss = self.loss_fn(logits, targets[start:end])
            micro_loss *= dist.get_world_size() / num_tokens.clamp(min=1)  # FSDP takes the mean
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
        self.model.eval()
        total_loss = torch.zeros((), device=self.device)
        num_tokens = torch.zeros((), device=self.device)
        for inputs, targets in self.val_loader:
            logits = self.model(inputs.to(self.device), use_cache=False).logits
            total_loss += self.loss_fn(logits, targets.to(self.device))
            num_tokens += (targets != IGNORED).sum()
        dist.all_reduce(total_loss)
        dist.all_reduce(num_tokens)
        val_loss = total_loss.item() / max(1, num_tokens.item())
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
            "model_key": self.model_key,
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
                if weight.requires_grad and f".param_groups.{name}." not in saved:
                    raise ValueError(f"{name} was frozen: keep --frozen_layers or train an export")
                if f".state.{name}." not in saved and self.optimizer.state.pop(weight, None):
                    self._log(f"{source} has no optimizer state of {name}: it had no gradient yet")
            snapshot = self._state_dict()
            if "model_key" not in saved:  # by older versions
                del snapshot["model_key"]
            if "totals" not in saved:  # saved by version 1.1
                del snapshot["totals"]
            dcp.load(snapshot, checkpoint_id=source)  # into the tensors in use
            if snapshot.get("model_key", self.model_key) != self.model_key:
                raise ValueError(f"began as {snapshot['model_key']}, not as this --model")
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
    parser.add_argument("--micro_batch_size", type=positive_int, default=32, help="in samples")
    stdlib_files = sorted(Path(os.__file__).parent.glob("*.py"))
    parser.add_argument("--text", nargs="+", type=Path, default=stdlib_files, metavar="FILE")
    parser.add_argument("--model", type=Path, default="model", help="a folder with safetensors")
    parser.add_argument("--export_path", default="finetuned", help="a folder, written at the end")
    parser.add_argument("--frozen_layers", type=int, default=0, help="first layers not to train")
    parser.add_argument("--context", type=positive_int, default=64, help="tokens per chunk")
    parser.add_argument("--learning_rate", type=float, default=1e-5)
    parser.add_argument("--warmup_steps", type=positive_int, help="default: a tenth of training")
    parser.add_argument("--recompute", action="store_true", help="recompute activations")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--peak_tflops", type=float, help="TFLOP/s of a device, for the MFU")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--snapshot_path", default="snapshot", help="a folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines show")
    if args.num_workers < 0:
        parser.error("--num_workers must be 0 or more")
    if not 0 < args.learning_rate < math.inf:
        parser.error("--learning_rate must be more than 0")
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
    if not (args.model / "config.json").is_file() or not list(args.model.glob("*.safetensors")):
        parser.error(f"no config.json or no *.safetensors in --model {args.model}")
    if not args.export_path or not os.access(os.path.dirname(args.export_path) or ".", os.W_OK):
        parser.error(f"cannot write {args.export_path}: create its folder, or set another path")
    if os.path.isfile(args.export_path):
        parser.error(f"--export_path {args.export_path} is a file: name a folder")
    if Path(args.export_path).resolve() == args.model.resolve():
        parser.error("--export_path must not be --model")
    return args


def configure_optimizer(model, learning_rate):
    """AdamW, with weight decay for matrices but not for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, learning_rate, betas=(0.9, 0.95), fused=True)


def weights_in_files(model):
    """Returns the state_dict, as shards; a head that is the embedding's matrix is saved once."""
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def load_pretrained(model, path):
    """Reads each rank's shards from the safetensors files in a folder."""
    weights = weights_in_files(model)
    reader = HuggingFaceStorageReader(path)
    index = path / "model.safetensors.index.json"  # of a model in several files
    try:
        metadata = reader.read_metadata().state_dict_metadata
        names = set(metadata)
        unknown = names - set(model.state_dict())
        unknown = [name for name in unknown if not name.endswith("rotary_emb.inv_freq")]
        if unknown:
            raise ValueError(f"the config does not describe {sorted(unknown)[:3]}")
        if twice := [name for name in names if len(metadata[name].chunks) > 1]:
            raise ValueError(f"two files have {sorted(twice)[:3]}: move one of them away")
        if index.exists():
            listed = json.loads(index.read_text())["weight_map"].values()
            if others := {file.name for file in path.glob("*.safetensors")} - set(listed):
                raise ValueError(f"{index.name} does not list {others}: move them away")
        dcp.load(weights, storage_reader=reader)
        if "lm_head.weight" in names - set(weights):  # some files hold a tied head twice
            head = torch.empty_like(model.lm_head.weight)
            dcp.load({"lm_head.weight": head}, storage_reader=reader)
            if not torch.equal(head.to_local(), model.lm_head.weight.to_local()):
                raise ValueError("lm_head.weight is not the embedding: untie them in config.json")
    except (Exception, dcp.CheckpointException) as error:
        sys.exit(f"cannot load the weights of {path}: another model's?\n{error!r}")


def export(model, tokenizer, args):
    """Writes a folder that `from_pretrained` can load, with weights in the type of `args.model`."""
    dtype = AutoConfig.from_pretrained(args.model).dtype or torch.float32
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0
    weights = dcp.state_dict.get_model_state_dict(model.to(dtype), options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(args.export_path, state_dict=weights, max_shard_size="5GB")
        tokenizer.save_pretrained(args.export_path)
        with contextlib.suppress(FileNotFoundError):  # the file has the tokens that end a text
            shutil.copy(args.model / "generation_config.json", args.export_path)
        print(f"exported to {args.export_path}")


def find_end(tokenizer):
    """Returns the token with which the chat template ends an answer."""
    chat = [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "Norway."}]
    ending = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("Norway.")[2]
    for token in tokenizer(ending, add_special_tokens=False).input_ids:
        if token in tokenizer.added_tokens_decoder:
            return token
    sys.exit(f"the chat template ends an answer with {ending!r}: add a special token to it")


def add_end(folder, end_id):
    """Adds a token to those at which the exported model stops."""
    path = Path(folder, "generation_config.json")
    config = json.loads(path.read_text())
    known = config.get("eos_token_id")  # one, several or none
    known = known if isinstance(known, list) else [known]
    config["eos_token_id"] = sorted({*known, end_id} - {None})
    path.write_text(json.dumps(config, indent=2))


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
        config = AutoConfig.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        with torch.device("meta"):  # shapes, but no memory
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        rotary_class = type(model.model.rotary_emb)
        end_id = find_end(tokenizer)
    except Exception as error:
        sys.exit(f"cannot use {args.model}: broken, or not the layout of Llama\n{error!r:.300}")
    if len(tokenizer) > config.vocab_size:
        sys.exit(f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}")
    if "strftime_now" in str(tokenizer.chat_template):
        sys.exit("the chat template writes the day's date: put one in place of strftime_now")
    if args.context > config.max_position_embeddings:
        sys.exit(f"--context must be {config.max_position_embeddings} or less for this model")
    try:
        files = [ChatDataset(path, args.context, tokenizer) for path in args.text]
    except UnicodeDecodeError as error:
        sys.exit(f"--text is not UTF-8: convert it, such as with iconv ({error})")
    val_size = math.ceil(args.val_tokens / args.context / len(files))  # chunks of each file
    dataset = ConcatDataset([Subset(file, range(len(file) - val_size)) for file in files])
    val_set = ConcatDataset([Subset(file, range(len(file))[-val_size:]) for file in files])
    if len(dataset) == 0 or len(val_set) < dist.get_world_size():
        chunks = f"{len(dataset)} chunks, and {len(val_set)} for validation"
        sys.exit(f"--text has {chunks}: add text, or change --val_tokens")
    if dist.get_rank() == 0:
        print(f"{len(dataset)} chats to train on, {len(val_set)} to validate on")
    chats = [chat for part in files for chat in part.chats]
    num_cut = sum(len(tokens) > args.context + 1 for tokens, _ in chats)
    num_lost = sum(prompt_length > args.context for _, prompt_length in chats)
    if num_cut > 0 and dist.get_rank() == 0:
        print(f"{num_cut} chats are cut to --context, {num_lost} of them before the answer")
    if not 0 <= args.frozen_layers < config.num_hidden_layers:
        sys.exit(f"--frozen_layers must be 0 or more, and less than {config.num_hidden_layers}")
    if args.frozen_layers > 0:
        model.model.embed_tokens.requires_grad_(False)  # else backward() would run down to it
        model.model.layers[: args.frozen_layers].requires_grad_(False)
    if args.recompute:
        model.activation_checkpointing_enable()
        model.disable_input_require_grads()  # or backward() would run down to frozen layers
        for block in model.model.layers[: args.frozen_layers]:
            block.gradient_checkpointing = False  # without a backward pass, a compiler refuses it
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    fsdp_config = {"mesh": mesh["dp"]}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        fsdp_config["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, **fsdp_config)
    if not config.tie_word_embeddings:  # a tied head is the embedding's matrix
        head = [model.model.norm, model.lm_head]
        fully_shard(head, **fsdp_config, reshard_after_forward=False)
    fully_shard(model, **fsdp_config)
    model.to_empty(device=device)  # memory for this rank's shards
    model.model.rotary_emb = rotary_class(config).to(device)  # computed, and so in no file
    embedding = model.model.embed_tokens
    if hasattr(embedding, "embed_scale"):  # Gemma's is computed, too
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    computed = set(dict(model.named_buffers())) - set(model.state_dict())
    filled = ("model.rotary_emb.", "model.embed_tokens.embed_scale")
    others = [name for name in computed if not name.startswith(filled)]
    if others:
        sys.exit(f"{args.model} has {others}, which are in no file: not the layout of Llama")
    load_pretrained(model, args.model)
    if args.compile:
        torch.set_float32_matmul_precision("high")  # TF32 for products of float32 matrices
        for block in model.model.layers:  # equal blocks share one compilation
            block.compile(dynamic=False)  # else, after a smaller batch, all run code for any size
    optimizer = configure_optimizer(model, args.learning_rate)
    loss_fn = torch.compile(next_token_loss, dynamic=False) if args.compile else next_token_loss
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
    export(model, tokenizer, args)
    if dist.get_rank() == 0:
        add_end(args.export_path, end_id)
    if device.type == "cpu":
        time.sleep(0.1)  # else gloo may abort at exit (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_args())
