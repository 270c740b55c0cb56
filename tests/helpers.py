"""Starts real processes, waits for their output, and computes the reference for their results."""

import contextlib
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from torch import nn

import singlegpu
from tools.processes import environments
from tools.steps import STEPS

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [STEPS[0].base, *(step.file for step in STEPS)]
SCRIPT_PATH = r"((recipes|by_hand|gpt)/)?\w+\.py"
NIGHTLY = [pytest.mark.long, pytest.mark.nightly]
TIMEOUT_S = 180  # of any one wait: several times what it takes on a busy laptop

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


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def patched(script, setup):
    """Returns the source of a script that runs `script` after `setup`, Python code that changes it.

    In `setup`, the module of the script is called `script`; its main has not run yet.
    """
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
    script.main(script.parse_args())
"""


def new_log(folder):
    folder.mkdir(exist_ok=True)
    return folder / f"{len(list(folder.glob('*.log')))}.log"


def environment():
    """Returns the variables of this process, without what would start a rank, and with Python."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "MASTER_"))}
    path = f"{Path(sys.executable).parent}:{ours['PATH']}"
    return ours | {"PATH": path, "OMP_NUM_THREADS": "1"}


class Job:
    """A started command; `output` is what it has printed so far, on stdout and stderr."""

    def __init__(self, command, folder, variables, **options):
        self.log = new_log(folder)
        self.marker = f"TEST_JOB={uuid.uuid4()}"
        variables = variables | dict([self.marker.split("=")])
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                # The scripts are named in the commands as a reader names them, from the root.
                re.sub(rf"(?<=\s)({SCRIPT_PATH})\b", rf"{shlex.quote(str(ROOT))}/\1", command),
                shell=True,
                cwd=folder,
                env=environment() | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **options,
            )

    @property
    def output(self):
        return self.log.read_text()

    def status(self):
        """Returns the exit status, or None while it runs."""
        return self.process.poll()

    def wait_for(self, text, times=1):
        deadline = time.monotonic() + TIMEOUT_S
        while self.output.count(text) < times:
            assert self.status() is None, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {TIMEOUT_S} s:\n{self.output}"
            time.sleep(0.01)

    def wait(self):
        deadline = time.monotonic() + TIMEOUT_S
        while self.status() is None:
            assert time.monotonic() < deadline, f"still running after {TIMEOUT_S} s:\n{self.output}"
            time.sleep(0.01)
        return self.status()

    def succeeds(self):
        assert self.wait() == 0, self.output
        # What DDP says of every device that is no GPU of NVIDIA's, as the pretended ones.
        output = re.sub(r".*Time stats are currently only collected for .*\n", "", self.output)
        assert "warn" not in output.lower(), output
        return output

    def fails(self, *words):
        """Asserts a failure, a line with all `words`, and no traceback of a script of ours."""
        assert self.wait() not in (0, None), self.output
        lines = self.output.splitlines()
        assert any(all(word in line for word in words) for line in lines), self.output
        # torchrun prints a traceback of its own; none may come from a script.
        assert not re.search(rf'File "{ROOT}/{SCRIPT_PATH}", line', self.output), self.output

    def workers(self):
        """Returns the process ids of the ranks that this torchrun has started, by local rank."""
        return {
            int(variables["LOCAL_RANK"]): pid
            for pid, variables in self.processes().items()
            if "LOCAL_RANK" in variables
        }

    def torchrun(self):
        """Returns the process id of this job's torchrun."""
        (pid,) = (
            pid
            for pid in self.processes()
            if b"/torchrun\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return pid

    def processes(self):
        """Returns the environment of each process of this job, orphans included, by process id."""
        found = {}
        for pid, environment in environments().items():
            variables = environment.split("\0")
            if self.marker in variables:
                found[pid] = dict(v.split("=", 1) for v in variables if "=" in v)
        return found

    def end(self):
        while pids := self.processes():  # again: one may have just started another
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait(TIMEOUT_S)


class Ranks(Job):
    """A process for each of `folders`, with what torchrun would tell it; all print into one log.

    Most of the time of a short training is the import of torch. Here a process that has done it
    forks the ranks, for tests in which it does not matter how the ranks are started. torch._dynamo
    is what the first optimizer of a process imports.
    """

    fork_context = multiprocessing.get_context("forkserver")
    fork_context.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed.checkpoint", "tqdm"]
    )

    def __init__(self, command, folders, variables, full_disk_folders):
        script, *arguments = command.split()
        self.folders = folders
        self.log = new_log(folders[0])
        self.log.touch()
        master = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        self.ranks = []
        for rank, folder in enumerate(folders):
            local_rank = folders[:rank].count(folder)
            world = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(folders)),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(folders.count(folder)),
                "GROUP_WORLD_SIZE": str(len(set(folders))),
                "GROUP_RANK": str(len(set(folders[:rank])) - (local_rank > 0)),
            }
            folder.mkdir(exist_ok=True)
            env = environment() | master | world | variables
            args = (
                str(ROOT / script),
                arguments,
                env,
                folder,
                self.log,
                folder in full_disk_folders,
            )
            self.ranks.append(self.fork_context.Process(target=forked.run, args=args))
            self.ranks[-1].start()

    def status(self):
        ended = [rank.exitcode for rank in self.ranks]
        # As a launcher does, ends the other ranks of a machine after a failure.
        failed = {folder for folder, code in zip(self.folders, ended, strict=True) if code}
        for rank, folder in zip(self.ranks, self.folders, strict=True):
            if folder in failed:
                rank.terminate()
        return None if None in ended else max(ended, key=abs)

    def signal(self, signum):
        """Sends every rank a signal, as torchrun does when it gets one."""
        for rank in self.ranks:
            os.kill(rank.pid, signum)

    def end(self):
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # and what it has started
            rank.kill()
            rank.join(TIMEOUT_S)
        self.ranks = []


class Shell:
    def __init__(self, folder):
        self.folder = folder
        self.jobs = []

    def start(self, command, node=".", **variables):
        """Starts `command` in the folder of `node`; nodes share no files with one another."""
        self.jobs.append(Job(command, self.folder / node, variables))
        return self.jobs[-1]

    def ranks(self, command, world_size=1, **variables):
        """Starts the ranks of a script on one node, without torchrun."""
        return self.ranks_on([self.folder] * world_size, command, **variables)

    def ranks_on(self, folders, command, full_disk_folders=(), **variables):
        """Starts a rank in each of the folders, one per node; the disks of some may be full."""
        self.jobs.append(Ranks(command, folders, variables, full_disk_folders))
        return self.jobs[-1]

    def run(self, command, **variables):
        return self.start(command, **variables).succeeds()

    def end_all(self):
        for job in self.jobs:
            job.end()


def pretend_gpus(count):
    """Returns the variables that let a process and its children believe in so many GPUs."""
    return {"PRETEND_GPUS": str(count), "PYTHONPATH": str(ROOT / "tests" / "pretend_gpus")}


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
# Sends every rank the signal SIGNAL at SIGNAL_AT, a number of epochs and one of samples.
SIGNAL = """
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


def write_text(path, chunks, context):
    """Writes so many chunks of random letters."""
    letters = random.Random(0).choices(b"abcdefgh", k=chunks * context + 1)
    path.write_bytes(bytes(letters))


def load_gpt(path):
    """Returns a snapshot of gpt/ as whole tensors: of a file, or the last one in a folder."""
    if path.is_file():
        return load(path)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # takes a second

    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(max(path.glob("epoch_[0-9]*/.metadata")).parent, file.name)
        return torch.load(file.name, weights_only=False)


def load(path):
    return torch.load(path, weights_only=True)


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


def assert_equal(one, other):
    """Asserts that two snapshots have the same weights, momentum and position, bit for bit."""
    for tensors, others in zip(weights_and_momentum(one), weights_and_momentum(other), strict=True):
        assert all(map(torch.equal, tensors, others))
    assert position(one) == position(other)
    # A resumed run adds the same numbers in another order.
    assert load(one)["loss"] == pytest.approx(load(other)["loss"], rel=1e-6)


def max_abs_diff(results, others):
    """Returns the largest difference between the tensors of two lists."""
    return max((a - b).abs().max().item() for a, b in zip(results, others, strict=True))


def equal_snapshots(one, other):
    """Tells whether two snapshots are equal, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            equal_snapshots(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal_snapshots, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
