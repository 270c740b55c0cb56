"""What tests change in scripts, and the reference for their results."""

import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import singlegpu
from tools.launch.jobs import free_port, pretend_gpus
from tools.launch.snapshots import load, load_gpt
from tools.steps import ROOT, STEPS

SCRIPTS = [STEPS[0].base, *(step.file for step in STEPS)]
NIGHTLY = [pytest.mark.long, pytest.mark.nightly]

MISSING = [
    package
    for tool, package in [("slurmctld", "slurm-wlm"), ("munged", "munge"), ("ip", "iproute2")]
    if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
]
needs_slurm = pytest.mark.skipif(
    bool(MISSING), reason=f"get the Slurm tests with: sudo apt-get install {' '.join(MISSING)}"
)


def long(*values):
    """Returns parameters whose tests are among the long ones."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def documented_errors():
    """Returns the lines of output that docs/errors.md and docs/hangs.md explain."""
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("errors.md", "hangs.md"))
    found = re.findall(r"^```text\n(.*?)^```", pages, re.DOTALL | re.MULTILINE)
    return "".join(found).splitlines()


def documented_error(line, *changes):
    """Returns a line that one of these pages explains, with (old, new) `changes`."""
    assert line in documented_errors(), f"{line!r} is not in docs/errors.md or docs/hangs.md"
    for old, new in changes:
        assert line.count(old) == 1, (old, line)
        line = line.replace(old, new)
    return line


def snippet(page, start):
    """Returns the block of Bash on a page that contains `start`."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = [b for b in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) if start in b]
    return block


def patched(script, setup):
    """Returns the source of a script that runs `script` after `setup`, Python code that changes it.

    In `setup`, the module of the script is called `script`; its main has not run yet.
    The ranks of multigpu.py, too, can then be started as others are, one by one.
    """
    rank = 'int(os.environ.pop("LOCAL_RANK")), ' if script == "multigpu.py" else ""
    return f"""
import functools, importlib.util, os, sys, time
import torch
from torch import nn
spec = importlib.util.spec_from_file_location("script", {str(ROOT / script)!r})
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)
{setup}
if __name__ == "__main__":
    script.main({rank}script.parse_args())
"""


def start_stage(shell, script, processes, arguments):
    """Starts a stage as documented; `processes` lists how many run on each node.

    All have the same files. Stage 2 starts a process per GPU, so these are pretended.
    """
    if script == "singlegpu.py":
        return [shell.start(f"python {script} {arguments}")]
    if script == "multigpu.py":
        return [shell.start(f"python {script} {arguments}", **pretend_gpus(processes[0]))]
    if script == "multigpu_torchrun.py":
        command = f"torchrun --standalone --nproc_per_node={processes[0]} {script} {arguments}"
        return [shell.start(command)]
    port = str(free_port())
    return [
        shell.start(
            f"torchrun --nnodes={len(processes)} --nproc_per_node={n} --rdzv_backend=c10d"
            f" --rdzv_endpoint=localhost:{port} multinode.py {arguments}"
        )
        for n in processes
    ]


# For `patched`: each rank prints how far its memory has grown at its peak, by the system's count.
MEASURE_MEMORY = """
import ctypes

def memory(field):
    # Without this, freed blocks of this size are kept for later, and the system counts them.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))

init_process_group = script.dist.init_process_group
def init_and_measure(*args, **options):
    init_process_group(*args, **options)
    script.start = memory("VmRSS:")
script.dist.init_process_group = init_and_measure
destroy_process_group = script.dist.destroy_process_group
def measure_and_destroy():
    print("rank", os.environ["RANK"], "took", memory("VmHWM:") - script.start)
    destroy_process_group()
script.dist.destroy_process_group = measure_and_destroy
script.Trainer._save_snapshot = lambda self: None
"""

# For `patched`: kills every rank, or the one named, before a step that is counted over all epochs.
KILL = """
live_run_batch = script.Trainer._run_batch
def run_batch_or_die(self, inputs, targets):
    step = self.epochs_run * len(self.train_loader) + -(-self.samples_run // 64)
    if step == int(os.environ.get("KILL_BEFORE_STEP", -1)):
        if os.environ.get("KILL_RANK") in (None, os.environ["RANK"]):
            os.kill(os.getpid(), 9)
    live_run_batch(self, inputs, targets)
script.Trainer._run_batch = run_batch_or_die
"""
DROPOUT = """
class Model(script.ToyModel):
    def __init__(self):
        super().__init__()
        self.relu = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
script.ToyModel = Model
"""
# Logs the loss of each snapshot in full; the script logs four digits of it.
LOG_LOSSES = """
save_snapshot = script.Trainer._save_snapshot
def save_and_log_loss(self):
    save_snapshot(self)
    self._log(f"at {self.epochs_run} + {self.samples_run} the loss is {self.loss!r}")
script.Trainer._save_snapshot = save_and_log_loss
"""


def logged_losses(output):
    """Returns what `LOG_LOSSES` has logged, by position."""
    found = re.findall(r"at (\d+) \+ (\d+) the loss is (\S+)", output)
    return {(int(epochs), int(samples)): float(loss) for epochs, samples, loss in found}


# For the files of gpt/: less to validate on, in chunks of eight tokens, and less to generate.
VAL_CHUNKS = 12
SHORT_VAL = f"--val_tokens {VAL_CHUNKS * 8}"
SHORT_GPT = """
if hasattr(script, "GPT"):
    generate = getattr(script.GPT, "generate", None)
    script.GPT.generate = lambda self, *arguments: generate(self, *arguments[:-1], 4)
"""
# Sends every rank the signal SIGNAL at SIGNAL_AT, a number of epochs and one of samples. The ranks
# ask after every tenth step whether to stop, however long the steps take.
SIGNAL = """
script.Trainer.check_every = property(lambda self: 10, lambda self, steps: None)
undisturbed_run_batch = script.Trainer._run_batch
def run_batch_after_signal(self, inputs, targets):
    if os.environ.get("SIGNAL_AT") == f"{self.epochs_run} {self.samples_run}":
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    undisturbed_run_batch(self, inputs, targets)
script.Trainer._run_batch = run_batch_after_signal
"""
# DDP's mean of the gradients and local SGD's of the weights are the same for a linear optimizer;
# and AdamW and clipping would hide a constant factor.
PLAIN_SGD = """
script.configure_optimizer = lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9)
nn.utils.clip_grad_norm_ = lambda parameters, max_norm, **options: None
nn.utils.clip_grads_with_norm_ = lambda parameters, max_norm, total_norm: None
"""


def gpt_config(n_layer, n_head, n_embd, context, **more):
    """Returns what a GPT of gpt/ takes its sizes from, in place of the arguments of a script."""
    return SimpleNamespace(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, context=context, recompute=False, **more
    )


def reference_run(epochs, batch_size, size=2048, seed=0, samples_run=0):
    """Trains without any of the series' machinery; returns weights, momentum, and losses by epoch.

    Each epoch takes the samples in a random order that only `seed` and the epoch's number decide.
    After the last one come `samples_run` samples of the next.
    """
    dataset = singlegpu.ToyDataset(size)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for epoch in range(epochs + 1):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))
        order, total = order[: size if epoch < epochs else samples_run], 0.0
        for batch in order.split(batch_size) if len(order) else ():
            optimizer.zero_grad()
            error = model(dataset.inputs[batch]) - dataset.targets[batch]
            loss = (error**2).mean()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / max(len(order), 1))
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [p.detach() for p in model.parameters()], momentum, losses[:epochs]


def weights_and_momentum(path):
    """Returns weights and momentum of a snapshot, in the order of `reference_run`."""
    snapshot = load(path)
    momentum = [state["momentum_buffer"] for state in snapshot["optimizer"]["state"].values()]
    return list(snapshot["model"].values()), momentum


def position(path):
    """Returns how many epochs, and samples of the next one, are trained in a snapshot."""
    snapshot = load(path)
    return snapshot["epochs_run"], snapshot["samples_run"]


def load_state(folder, name):
    """Returns what the snapshot in a folder says by that name: a file, or the newest folder."""
    files = [path for path in folder.glob("snapshot*") if path.suffix != ".tmp"]
    return load_gpt(*files)[name]


def assert_equal(one, other):
    """Asserts that two snapshots have the same weights, momentum and position, bit for bit."""
    for tensors, others in zip(weights_and_momentum(one), weights_and_momentum(other), strict=True):
        assert all(map(torch.equal, tensors, others))
    assert position(one) == position(other)
    # A resumed run adds the same numbers in another order.
    assert load(one)["loss"] == pytest.approx(load(other)["loss"], rel=1e-6)


def equal_snapshots(one, other):
    """Tells whether two snapshots are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal_snapshots(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_snapshots, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
