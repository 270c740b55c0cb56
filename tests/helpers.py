"""What tests change in scripts, and the reference for their results."""

import importlib
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from rankcheck.launch.jobs import TIMEOUT_S, environment
from torch import nn

import singlegpu
from tools.launch.jobs import missing_packages
from tools.launch.patched import after as after
from tools.launch.patched import before as before
from tools.launch.patched import patch as patch
from tools.launch.snapshots import equal_snapshots as equal_snapshots
from tools.launch.snapshots import load, load_gpt, max_abs_diff
from tools.steps import ALL, ROOT, STEPS

SCRIPTS = [STEPS[0].base, *(step.file for step in STEPS)]
NAMES = ["singlegpu.py", *(step.file for step in ALL if step.file.endswith(".py"))]
LONG = pytest.mark.long
NIGHTLY = pytest.mark.nightly
IGNORED = shutil.ignore_patterns(".venv", ".git", "runs", "logs", "site", "*.pt", "*.pyc")
ALL_DONE = 'until left=$(squeue -h) && [ -z "$left" ]; do sleep 0.5; done'
needs_slurm = pytest.mark.skipif(
    bool(missing_packages()),
    reason=f"get the Slurm tests with: sudo apt-get install {' '.join(missing_packages())}",
)


def run(*command, folder=ROOT, **options):
    """Runs a command with the Python of these tests; returns its status and what it has printed."""
    options = {"env": environment(), "timeout": 10 * TIMEOUT_S} | options
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)


def read_script(name):
    """Returns a file in a folder scripts/ of these tests, such as `setup` for `patch`."""
    (path,) = (ROOT / "tests").glob(f"**/scripts/{name}")
    return f"\n{path.read_text()}"


def module(script):
    """Returns the module of a script."""
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


class Lazy:
    """Stands for a module, and imports it when something in it is used."""

    def __init__(self, name):
        self.name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # for such, pytest asks everything that it collects
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self.name), attribute)


def edit(path, old, new):
    """Replaces text in a file, which must have it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def long(*values):
    """Returns parameters whose tests are among the long ones."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def first(number, values, marks=NIGHTLY):
    """Returns parameters, tuples if there are several, of which all but the first ones have marks.

    By default they are left to the night.
    """
    rest = [value if type(value) is tuple else (value,) for value in values[number:]]
    return [*values[:number], *(pytest.param(*value, marks=marks) for value in rest)]


def fences(page, language):
    """Returns what stands in the fences of a language on a page of docs/."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def snippet(page, start, language="bash"):
    """Returns the one of these fences that contains `start`."""
    (fence,) = [fence for fence in fences(page, language) if start in fence]
    return fence


def documented_error(line):
    """Returns a line of output, which docs/errors.md must explain."""
    shown = "".join(fences("errors.md", "text")).splitlines()
    assert line in shown, f"{line!r} is not in docs/errors.md"
    return line


def start(shell, script, options, setup="", ranks=2, **variables):
    """Starts the ranks of a script after `setup`, as `patch` has it."""
    return shell.ranks(f"{patch(shell.folder, script, setup)} {options}", ranks, **variables)


# What follows is `setup` for `patch`.

MEMORY = """
import ctypes
def memory(field):
    # Without this, freed blocks of this size are kept for later, and the system counts them.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
script.memory = memory
"""
# Each rank prints how far its memory has grown at its peak, by the system's count.
MEASURE_MEMORY = f"""{MEMORY}
@after(script.dist, "init_process_group")
def measure_start(*args, **options):
    script.start = memory("VmRSS:")

@before(script.dist, "destroy_process_group")
def measure_peak():
    print("rank", os.environ["RANK"], "took", memory("VmHWM:") - script.start)

script.Trainer._save_snapshot = lambda self: None
"""
# A process ends when it has its model, for which `limit_memory` may have left too little memory.
LIMIT_MEMORY = f"""{MEMORY}
import resource
def limit_memory(growth):
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData:") + growth, hard_limit))

@before(script, "configure_optimizer")
def end(model, learning_rate):
    print("started")
    sys.exit()
"""
# Data workers are forked, as they are under torchrun; a rank of `jobs.Ranks` would spawn them.
FORK = """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)
"""


def resize(size):
    """The data set has so many samples."""
    return f"ToyDataset = script.ToyDataset\nscript.ToyDataset = lambda _: ToyDataset({size})\n"


def pause(seconds):
    """Each step takes so much longer, so that what happens to it comes before the end."""
    return f"""
@before(script.Trainer, "_run_batch")
def pause(self, inputs, targets):
    time.sleep({seconds})
"""


def at_step(step, fault):
    """Does something before a step, which each process counts from 1."""
    return f"""
@before(script.Trainer, "_run_batch")
def at_step(self, inputs, targets):
    self.step = getattr(self, "step", 0) + 1
    rank = script.dist.get_rank()
    if self.step == {step}:
        {fault}
"""


# Kills every rank before the step KILL_AT.
KILL = at_step('int(os.environ.get("KILL_AT", 0))', "os.kill(os.getpid(), 9)")
DROPOUT = """
class Model(script.ToyModel):
    def __init__(self):
        super().__init__()
        self.relu = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
script.ToyModel = Model
"""
BATCH_NORM_AND_DROPOUT = DROPOUT.replace("nn.ReLU()", "nn.ReLU(), nn.BatchNorm1d(10)")
# Logs the loss of each snapshot in full; the script logs four digits of it.
LOG_LOSSES = """
@after(script.Trainer, "_save_snapshot")
def log_loss(self):
    self._log(f"at {self.epochs_run} + {self.samples_run} the loss is {self.loss!r}")
"""


def logged_losses(output):
    """Returns what `LOG_LOSSES` has logged, by position."""
    found = re.findall(r"at (\d+) \+ (\d+) the loss is (\S+)", output)
    return {(int(epochs), int(samples)): float(loss) for epochs, samples, loss in found}


# A clock by which the n-th step takes n ms; and each snapshot, and each evaluation, a second.
CLOCK = """
clock = [0.0]
time.perf_counter = lambda: clock[0]
@before(script.Trainer, "_run_batch")
def take_time(self, inputs, targets):
    clock[0] += (self.steps + 1) / 1000
def take_a_second(self):
    clock[0] += 1
before(script.Trainer, "_save_snapshot")(take_a_second)
before(script.Trainer, "_evaluate")(take_a_second)
"""
# For the files of gpt/: less to validate on, in chunks of eight tokens, and less to generate.
VAL_CHUNKS = 12
SHORT_VAL = f"--val_tokens {VAL_CHUNKS * 8}"
SHORT_GPT = """
if hasattr(script, "GPT"):
    generate = getattr(script.GPT, "generate", None)
    script.GPT.generate = lambda self, *arguments: generate(self, *arguments[:-1], 4)
"""
SIGNAL = read_script("signals.py")
# DDP's mean of the gradients and local SGD's of the weights are the same for a linear optimizer;
# and AdamW and clipping would hide a constant factor.
PLAIN_SGD = """
def configure_sgd(model, learning_rate):
    # A group each, since expert_parallel.py clips those of a mesh together.
    groups = [{"params": [p]} for p in model.parameters()]
    return torch.optim.SGD(groups, learning_rate, momentum=0.9)
script.configure_optimizer = configure_sgd
def measure_norm(parameters, max_norm, **options):
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
nn.utils.clip_grad_norm_ = measure_norm
nn.utils.clip_grads_with_norm_ = lambda parameters, max_norm, total_norm: None
"""
# With --compile, runs what is traced of a block, forward and backward, without a compiler; the loss
# is left out, which would be traced in float32.
AOT_EAGER = """
trace = functools.partial(torch.compile, backend="aot_eager")
def trace_blocks(function, **options):
    return trace(function, **options) if hasattr(function, "__self__") else function
torch.compile = trace_blocks
"""


def gpt_config(n_layer, n_head, n_embd, context, **more):
    """Returns what a GPT of gpt/ takes its sizes from, in place of the arguments of a script."""
    return SimpleNamespace(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, context=context, recompute=False, **more
    )


def reference_run(epochs, batch_size, size=2048, seed=0):
    """Trains without any of the series' machinery; returns weights, momentum, and losses by epoch.

    Each epoch takes the samples in a random order that only `seed` and the epoch's number decide.
    """
    dataset = singlegpu.ToyDataset(size)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch))
        total = 0.0
        for batch in order.split(batch_size):
            optimizer.zero_grad()
            error = model(dataset.inputs[batch]) - dataset.targets[batch]
            loss = (error**2).mean()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / size)
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [p.detach() for p in model.parameters()], momentum, losses


def weights_and_momentum(path):
    """Returns weights and momentum of a snapshot, in the order of `reference_run`."""
    snapshot = load(path)
    momentum = [state["momentum_buffer"] for state in snapshot["optimizer"]["state"].values()]
    return list(snapshot["model"].values()), momentum


def assert_trained(path, epochs, batch_size, tolerance=1e-6, **options):
    """Asserts that a snapshot is that of `reference_run`, but for rounding; returns the losses."""
    weights, momentum, losses = reference_run(epochs, batch_size, **options)
    result, result_momentum = weights_and_momentum(path)
    assert max_abs_diff(result, weights) < tolerance
    assert max_abs_diff(result_momentum, momentum) < 10 * tolerance
    return losses


def curves(folder):
    """Returns the steps and values of each curve, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow

    reader = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def position(path):
    """Returns how many epochs, and samples of the next one, are trained in a snapshot."""
    snapshot = load(path)
    return snapshot["epochs_run"], snapshot["samples_run"]


def load_state(folder, name):
    """Returns what the snapshot in a folder says by that name: a file, or the newest folder."""
    files = [path for path in folder.glob("snapshot*") if path.suffix != ".tmp"]
    return load_gpt(*files)[name]


def weights_diff(shell, snapshot, reference):
    """Returns the largest difference between the weights of two snapshots."""
    model, other = (load_gpt(shell.folder / path)["model"] for path in (snapshot, reference))
    assert model.keys() == other.keys()
    assert all(tensor.dtype == other[name].dtype for name, tensor in model.items())
    return max_abs_diff([model[name] for name in other], other.values())


def assert_equal(one, other):
    """Asserts that two snapshots are equal, bit for bit.

    But for the loss: a resumed run adds the same numbers in another order.
    """
    snapshots = [load_gpt(path) for path in (one, other)]
    for name in ("loss", "totals"):
        losses = [snapshot.pop(name) for snapshot in snapshots]
        assert torch.allclose(*map(torch.as_tensor, losses), rtol=1e-6)
    assert equal_snapshots(*snapshots)
