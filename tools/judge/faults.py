"""Faulty versions of the stages: python -m tools.judge.faults 3 > broken.py writes the third.

Each is a file of the series with a small edit, such as beginners make. The first ten are what
docs/faults.md asks about. All of them prove tools/judge/checks.py: see tests/test_check.py. A new
one is worth its half minute if a check fails on it in a line where it fails on no other.
"""

import sys
import textwrap
from typing import NamedTuple

from tools.pages.fences import python_units
from tools.steps import ROOT


class Fault(NamedTuple):
    what: str
    stage: str
    fails: str  # the checks that must fail on it, and no others
    edits: tuple[str, ...]  # old text, new text, and so on

    def source(self):
        """Returns the faulty script."""
        text = (ROOT / f"{self.stage}.py").read_text()
        for old, new in zip(self.edits[::2], self.edits[1::2], strict=True):
            if text.count(old) != 1:
                raise ValueError(f"{self.what}: {text.count(old)} times in {self.stage}.py: {old}")
            text = text.replace(old, new)
        return text


ALL_REDUCE = "        dist.all_reduce(self.total_loss)  # the sum over all ranks\n"
SET_EPOCH = "        self.train_loader.sampler.set_epoch(epoch)\n"
LOAD = "            self._load_snapshot(args.snapshot_path)\n"
LOAD_OPTIMIZER = '            self.optimizer.load_state_dict(snapshot["optimizer"])\n'
SAVE_OPTIMIZER = '            "optimizer": self.optimizer.state_dict(),\n'
SAVE_POSITION = '            "samples_run": self.samples_run,\n'
SAMPLER = "        sampler=sampler,\n"
MEAN_LOSS = "        dist.all_reduce(total_loss)  # the sum over all ranks\n"
RANK_0_LOSS = "        total_loss *= dist.get_world_size()\n"
SEEDED_SAMPLER = "DistributedSampler(dataset, seed=args.seed)"
DROP_LAST = "DistributedSampler(dataset, seed=args.seed, drop_last=True)"
SAME_START = "        self._ensure_same_start()\n"
EPOCHS_LEFT = "range(self.epochs_run, total)"
ONE_MORE = "range(self.epochs_run, max(total, self.epochs_run + 1))"
SAVE_LOSS = '            "loss": self.loss,\n'
OWN_SESSION = "        worker_init_fn=start_own_session,\n"
AFTER_FAILURE = "            atexit.register(self._save_after_failure)\n"
SET_DEVICE = "        torch.cuda.set_device(device)\n"
BROADCAST = (
    "        for tensor in module.state_dict().values():\n"
    "            dist.broadcast(tensor, src=0)\n"
)
WEIGHT = (
    "        loss = loss * local_size / global_size * dist.get_world_size()"
    "  # DDP averages over ranks\n"
)
KEEP_SUM = "self.total_loss += loss.detach() * global_size / dist.get_world_size()"
FAULTS = [
    Fault("set_epoch is missing", "multigpu", "order", (SET_EPOCH, "")),
    Fault(
        "rank 0 alone calls a collective",
        "multigpu",
        "starts",
        (ALL_REDUCE, f"        if self.is_main:\n    {ALL_REDUCE}"),
    ),
    Fault(
        "the model is called without its wrapper",
        "multigpu",
        "weights",
        (
            "self.loss_fn(self.model(inputs), targets)",
            "self.loss_fn(self.model.module(inputs), targets)",
        ),
    ),
    Fault(
        "every rank trains on every sample",
        "multigpu",
        "samples",
        (
            SAMPLER,
            "        shuffle=True,\n",
            SET_EPOCH,
            "",
            "self.train_loader.sampler.total_size",
            "len(self.train_loader.sampler)",
        ),
    ),
    Fault(
        "the snapshot has the wrapper's names",
        "multigpu",
        "snapshot resume",
        ("self.model.module.state_dict(),  # without the DDP wrapper", "self.model.state_dict(),"),
    ),
    Fault(
        "the optimizer is not saved",
        "multigpu_torchrun",
        "snapshot resume restart",
        (
            SAVE_OPTIMIZER,
            "",
            LOAD_OPTIMIZER,
            f'            if "optimizer" in snapshot:\n    {LOAD_OPTIMIZER}',
        ),
    ),
    Fault(
        "the loss is that of rank 0 alone",
        "multigpu_torchrun",
        "loss",
        (ALL_REDUCE, "", "self.train_loader.sampler.total_size", "len(self.train_loader.sampler)"),
    ),
    Fault(
        "local rank 0 of each node saves",
        "multinode",
        "save log",
        (
            "self.is_main = dist.get_rank() == 0",
            'self.is_main = os.environ["LOCAL_RANK"] == "0"',
            '{path}.tmp"',
            '{path}.{dist.get_rank()}.tmp"',
        ),
    ),
    Fault(
        "each rank stops when the signal has reached itself",
        "preemptible",
        "signal",
        (
            "self.steps == self.next_check and self._any_rank_stops()",
            "self.stop_requested",
        ),
    ),
    Fault(
        "uneven shards count as if they were even",
        "elastic_ddp",
        "weights node",
        (WEIGHT, "", KEEP_SUM, "self.total_loss += loss.detach() * local_size"),
    ),
    # Those that are not on the page
    Fault(
        "one process",
        "multigpu",
        "processes",
        ("world_size = torch.cuda.device_count() or 2 ", "world_size = 1 "),
    ),
    Fault(
        "an epoch is repeated",
        "multigpu_torchrun",
        "snapshot resume restart",
        ('"epochs_run": self.epochs_run,', '"epochs_run": self.epochs_run - 1,'),
    ),
    Fault(
        "the batch is divided once more",
        "multigpu_torchrun",
        "batch",
        ("        args.batch_size,\n", "        args.batch_size // dist.get_world_size(),\n"),
    ),
    Fault(
        "no set_device",
        "multigpu_torchrun",
        "gpus",
        (
            SET_DEVICE,
            "",
            'dist.init_process_group("nccl", device_id=device)',
            'dist.init_process_group("nccl")',
        ),
    ),
    Fault(
        "the inputs stay on the CPU",
        "multigpu_torchrun",
        "device",
        ("            inputs = inputs.to(self.device, non_blocking=True)\n", ""),
    ),
    Fault(
        "a CPU tensor in a collective",
        "multigpu_torchrun",
        "device",
        (
            "        dist.all_reduce(self.total_loss)  # the sum over all ranks\n",
            "        self.total_loss = self.total_loss.cpu()\n"
            "        dist.all_reduce(self.total_loss)\n",
        ),
    ),
    Fault(
        "what is on the GPU is pinned",
        "multigpu_torchrun",
        "device",
        (
            "    Trainer(model, train_loader",
            '    if device.type == "cuda":\n'
            "        dataset.inputs = dataset.inputs.to(device)\n"
            "    Trainer(model, train_loader",
        ),
    ),
    Fault("the snapshot is not loaded", "multigpu_torchrun", "resume previous restart", (LOAD, "")),
    Fault(
        "only rank 0 loads",
        "multigpu_torchrun",
        "resume previous restart",
        (
            LOAD,
            "            if self.is_main:\n"
            "                self._load_snapshot(args.snapshot_path)\n",
        ),
    ),
    Fault(
        "another data set on each rank",
        "multigpu_torchrun",
        "samples",
        ("manual_seed(0)  # the same samples each time", 'manual_seed(int(os.environ["RANK"]))'),
    ),
    Fault(
        "the momentum begins anew",
        "multigpu_torchrun",
        "resume previous restart",
        (LOAD_OPTIMIZER, ""),
    ),
    Fault("no look at the other nodes' snapshots", "multinode", "disks", (SAME_START, "")),
    Fault(
        "the GPU is chosen by the rank",
        "multinode",
        "gpus",
        (
            'local_rank = int(os.environ["LOCAL_RANK"])',
            'local_rank = int(os.environ["RANK"])',
            "        if local_rank >= torch.cuda.device_count():\n",
            "        if False:\n",
        ),
    ),
    Fault(
        "the position within the epoch is not saved",
        "resumable",
        "restart steps",
        (SAVE_POSITION, ""),
    ),
    Fault(
        "no save at the end", "multigpu_torchrun", "resume", (" or self.epochs_run == total", "")
    ),
    Fault("no end of the epochs", "multigpu_torchrun", "resume", (EPOCHS_LEFT, ONE_MORE)),
    Fault("samples dropped", "multigpu_torchrun", "samples", (SEEDED_SAMPLER, DROP_LAST)),
    Fault("no map_location", "multigpu_torchrun", "gpus", (', map_location="cpu"', "")),
    Fault(
        "only the epochs of the nodes are compared",
        "resumable",
        "disks",
        (
            "all_gather_object(starts, (self.epochs_run, self.samples_run, self.order))",
            "all_gather_object(starts, (self.epochs_run, self.order))",
        ),
    ),
    Fault("signals reach data workers", "preemptible", "signal", (OWN_SESSION, "")),
    Fault("the loss so far is not saved", "resumable", "steps", (SAVE_LOSS, "")),
    Fault("each node loads its own snapshot", "elastic_ddp", "newest", (SAME_START, "")),
    Fault("no save after a failure", "elastic_ddp", "node", (AFTER_FAILURE, "            pass\n")),
    Fault("the loss is rank 0's own", "gpt/fsdp", "loss signal", (MEAN_LOSS, RANK_0_LOSS)),
    Fault("no broadcast", "by_hand/ddp", "weights resume restart", (BROADCAST, "")),
    Fault(
        "sum in place of mean",
        "by_hand/ddp",
        "weights",
        ("        self.flat /= dist.get_world_size()\n", ""),
    ),
    Fault(
        "a step before the last all-reduce has ended",
        "by_hand/ddp",
        "weights",
        ("        self.work.wait()\n", ""),
    ),
    Fault(
        "each rank draws other weights",
        "gpt/fsdp",
        "weights",
        ("seed + zlib.crc32(name.encode())", "seed + zlib.crc32(name.encode()) + dist.get_rank()"),
    ),
    Fault(
        "gradients are not clipped",
        "gpt/fsdp",
        "weights",
        ("        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)\n", ""),
    ),
    Fault(
        "replicated, not sharded",
        "gpt/fsdp",
        "sharded",
        (
            '(dist.get_world_size(),), mesh_dim_names=("dp",)',
            '(dist.get_world_size(), 1), mesh_dim_names=("dp", "shard")',
            '{"mesh": mesh["dp"]}',
            '{"mesh": mesh}',
        ),
    ),
]


def write_page(number):
    """Prints the functions of a faulty script that the edits have changed, for docs/faults.md."""
    fault = FAULTS[number - 1]
    units = python_units((ROOT / f"{fault.stage}.py").read_text())
    changed = [
        textwrap.dedent("\n".join(lines)).strip("\n")
        for name, lines in python_units(fault.source()).items()
        if lines != units[name]
    ]
    print("```python", "\n\n\n".join(changed), "```", sep="\n")


if __name__ == "__main__":
    numbers = [str(number) for number in range(1, 11)]
    if sys.argv[1:2] not in [[number] for number in numbers]:
        sys.exit("name one of the scripts 1 to 10: python -m tools.judge.faults 3 > broken.py")
    print(FAULTS[int(sys.argv[1]) - 1].source(), end="")
