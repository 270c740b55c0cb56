"""What a reader changes, or a cluster does, must not go wrong in silence."""

import re
import signal
import textwrap
from pathlib import Path

import pytest
import torch
from gpt_helpers import TINY, options_of, write_tokens
from helpers import (
    DROPOUT,
    FORK,
    LONG,
    NAMES,
    SHORT_VAL,
    SIGNAL,
    assert_equal,
    assert_trained,
    documented_error,
    first,
    load_state,
    long,
    pause,
    read_script,
    resize,
    snippet,
    start,
    weights_diff,
)
from rankcheck.launch.jobs import free_port

from tools.launch.snapshots import equal_snapshots, load, logged_positions, write_text
from tools.steps import ROOT

GPT = f"{TINY} --text text --batch_size 4"
TOKENS = f"{TINY} {SHORT_VAL} --data tokens --batch_size 4 --generate 0"
# Killed by SIGKILL after five of the steps of an epoch, of which the snapshot has four.
STOPPED = [
    ("resumable.py", "--save_every_steps 4", 320),
    ("elastic_ddp.py", "--save_every_steps 4", 320),
    ("gpt/dcp.py", f"{GPT} {SHORT_VAL} --generate 0 --save_every_steps 4", 40),
    ("gpt/gpt.py", f"{GPT} --generate 0 --save_every_steps 4", 40),
    ("gpt/tokens.py", f"{TOKENS} --save_every_steps 4", 72),
]
# What each reads, and two bytes of it.
FILES = {name: [("text", b"ab")] for name in ("gpt/gpt.py", "gpt/dcp.py")}
FILES["gpt/tokens.py"] = [("tokens/1.uint16", b"89"), ("tokens/tokenizer.json", b"89")]


def exchange(path, pair):
    """Writes one of two bytes for the other; a second time, the file is as it was."""
    path.write_bytes(path.read_bytes().translate(bytes.maketrans(pair, pair[::-1])))


@pytest.mark.parametrize("script, options, samples", first(1, STOPPED, LONG))
def test_other_seed_or_data_within_an_epoch(shell, script, options, samples):
    """It is refused, and the snapshot left as it is; the same seed and data go on."""
    write_text(shell.folder / "text", 100, 8)
    write_tokens(shell.folder / "tokens", 100, 8)
    variables = {"SIGNAL": "9", "SIGNAL_AT": f"0 {samples}"}
    assert start(shell, script, f"2 {options}", SIGNAL, **variables).wait() == -signal.SIGKILL
    job = start(shell, script, f"2 {options} --seed 1")
    if script == "resumable.py":
        job.fails(documented_error("its epoch has seed 0, 2048 samples, not seed 1, 2048 samples"))
    job.fails("its epoch has seed 0, ", ", not seed 1, ")
    for name, pair in FILES.get(script, []):
        exchange(shell.folder / name, pair)  # of the same size
        start(shell, script, f"2 {options}").fails("its epoch has seed 0, ", ", not seed 0, ")
        exchange(shell.folder / name, pair)
    if script not in FILES:
        job = start(shell, script, f"2 {options}", resize(2049))
        job.fails("its epoch has seed 0, 2048 samples, not seed 0, 2049 samples")
    assert "0 of 1 epochs done" in start(shell, script, f"1 {options}").succeeds()
    # Between epochs, both may change.
    assert "1 of 2 epochs done" in start(shell, script, f"2 {options} --seed 1").succeeds()


OWN_SEED = """
Sampler = script.ResumableSampler
script.ResumableSampler = lambda dataset, seed: Sampler(dataset, seed=seed + script.dist.get_rank())
"""


@pytest.mark.parametrize(
    "setup, own",
    [
        (resize("2048 - 8 * int(os.environ['RANK'])"), "'seed 0, 2040 samples'"),
        (OWN_SEED, "'seed 1, 2048 samples'"),
    ],
)
def test_ranks_with_other_data_or_seeds(shell, setup, own):
    job = start(shell, "elastic_ddp.py", "2", setup)
    job.fails("ranks start at [(0, ", "'seed 0, 2048 samples'), (0, ", own, "use one seed")
    assert not (shell.folder / "snapshot.pt").exists()


@pytest.mark.parametrize("script", first(1, [*FILES], LONG))
def test_ranks_with_other_data_of_equal_size(shell, script):
    folders = [shell.folder / "a", shell.folder / "b"]
    for folder in folders:
        folder.mkdir()
        write_text(folder / "text", 100, 8)
        write_tokens(folder / "tokens", 100, 8)
    options = next(options for name, options, _ in STOPPED if name == script)
    name, pair = FILES[script][-1]
    exchange(folders[1] / name, pair)
    job = shell.ranks_on(folders, f"{script} 1 {options}")
    job.fails("ranks start at [(", ": share the disk (or see own_disks.py), use one seed")


# Breaks a value of some ranks after the last step of an epoch, so that no loss shows it.
BREAK = """
@after(script.Trainer, "_run_batch")
def break_value(self, inputs, targets):
    if self.epochs_run == 1 and os.environ["RANK"] in os.environ["BROKEN"]:
        name, value = os.environ["VALUE"].split()
        tensors = self.optimizer.param_groups[0]["params"]
        if name != "weight":
            tensors = [state[name] for state in self.optimizer.state.values()]
        tensor = getattr(tensors[0], "_local_tensor", tensors[0])
        tensor.data.view(-1)[0] = float(value)
"""
NOT_FINITE = [
    ("multinode.py", "01", "weight nan"),
    ("recipes/stream.py", "01", "weight inf"),
    ("by_hand/fsdp.py", "1", "weight inf"),
    ("gpt/fsdp.py", "1", "weight nan"),
    ("recipes/fsdp.py", "1", "weight -inf"),
    ("by_hand/zero.py", "01", "weight nan"),
    ("gpt/pretrain.py", "01", "weight nan"),
]


def options_with(script, epochs):
    """Returns arguments with which each epoch is one step."""
    if script.startswith("gpt/"):
        return f"{epochs} 1 {GPT} {SHORT_VAL} --generate 0 --learning_rate 1e-9"
    streamed = script in ("elastic_ddp.py", "recipes/stream.py")
    return f"{epochs} 1 " + ("--global_batch_size 2048" if streamed else "--batch_size 1024")


@pytest.mark.parametrize("script, broken, value", first(2, NOT_FINITE, LONG))
def test_no_weight_that_is_not_finite_is_saved(shell, script, broken, value):
    """Also if it is in one rank's shard."""
    write_text(shell.folder / "text", 8 + 12, 8)
    job = start(shell, script, options_with(script, 2), BREAK, BROKEN=broken, VALUE=value)
    job.fails("cannot save: a weight is nan or inf; lower the learning rate?")
    assert "Traceback" not in job.output
    assert load_state(shell.folder, "epochs_run") == 1


# Two of the first add to -inf.
MASKS = """
LOWEST = torch.finfo(torch.float32).min
@before(script.Trainer, "__init__")
def add_masks(self, model, *args):
    for number, value in enumerate([LOWEST, LOWEST, -torch.inf]):
        model.register_buffer(f"mask_{number}", torch.full((2,), value))
"""
# The states of other ranks' shards are None after a resume.
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
torch.optim.SGD = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
@before(script.Trainer, "_save_snapshot")
def consolidate(self):
    self.optimizer.consolidate_state_dict()
"""
OTHER_TYPES = """
@before(script.Trainer, "__init__")
def add_buffers(self, model, *args):
    model.register_buffer("complex64", torch.full((2,), complex("nan")))
    model.register_buffer("float8", torch.ones(2).to(torch.float8_e4m3fn))
    model.register_buffer("sparse_eye", torch.eye(2).to_sparse())
"""
INFINITE_SQUARE = f"os.environ.update(BROKEN='01', VALUE='exp_avg_sq inf')\n{BREAK}"
SAVED = [
    ("singlegpu.py", MASKS + OTHER_TYPES, 1),
    ("multinode.py", ZERO, 2),
    ("recipes/stream.py", MASKS, 2),
    ("gpt/fsdp.py", MASKS, 2),
    ("recipes/fsdp.py", MASKS, 2),
    ("by_hand/zero.py", MASKS, 2),
    ("gpt/pretrain.py", MASKS + INFINITE_SQUARE, 2),
]


@pytest.mark.parametrize("script, setup, ranks", first(1, SAVED, LONG))
def test_what_is_no_weight_may_be_infinite(shell, script, setup, ranks):
    """It is saved and resumed."""
    write_text(shell.folder / "text", 8 + 12, 8)
    for epochs in (1, 2, 3):
        output = start(shell, script, options_with(script, epochs), setup, ranks).succeeds()
        assert f"{epochs - 1} of {epochs} epochs done" in output
        assert "Warning" not in output


NUMPY_RATE = """
import numpy
SGD = torch.optim.SGD
torch.optim.SGD = lambda parameters, lr, **options: SGD(parameters, numpy.float64(lr), **options)
"""


@pytest.mark.parametrize("script", ["singlegpu.py", "elastic_ddp.py"])
def test_what_no_run_could_load_is_not_saved(shell, script):
    job = start(shell, script, "1", NUMPY_RATE, ranks=1)
    job.fails("cannot save snapshot.pt: ", "or not plain numbers? UnpicklingError(")
    assert "Unsupported global: GLOBAL numpy" in job.output
    assert not (shell.folder / "snapshot.pt").exists()


TIME_FIRST = """
class Model(script.ToyModel):
    def forward(self, inputs):
        return super().forward(inputs.T)
script.ToyModel = Model

def collate(samples):
    inputs, targets = torch.utils.data.default_collate(samples)
    return inputs.T, targets  # of shape (10, batch) and (batch, 5)
script.DataLoader = functools.partial(script.DataLoader, collate_fn=collate)
"""


@pytest.mark.parametrize(
    "script, ranks", first(1, [("singlegpu.py", 1), ("multinode.py", 2)], LONG)
)
def test_resumed_with_data_workers_and_dropout(shell, script, ranks):
    options = "--num_workers 1 --snapshot_path"
    for epochs in (1, 2):
        start(shell, script, f"{epochs} 1 {options} resumed", FORK + DROPOUT, ranks).succeeds()
    start(shell, script, f"2 1 {options} straight", FORK + DROPOUT, ranks).succeeds()
    assert weights_diff(shell, "resumed", "straight") == 0


def test_workers_of_ranks_draw_different_numbers(shell):
    setup = f"""{FORK}
class Dataset(script.ToyDataset):
    def __getitem__(self, index):
        if index % 100 == 0:
            print("drawn", torch.rand(()).item())
        return super().__getitem__(index)
script.ToyDataset = Dataset
"""
    output = start(shell, "multinode.py", "2 --num_workers 2", setup).succeeds()
    drawn = re.findall(r"drawn (\S+)", output)
    assert len(drawn) == len(set(drawn)) > 30


LOSSES = """
import torch.distributed as dist
import torch.nn.functional as F
{functions}
nn.MSELoss = lambda: {name}
SGD = torch.optim.SGD
torch.optim.SGD = lambda parameters, lr, **options: SGD(parameters, 1e-4, **options)
"""


def diff_of_two_ranks(shell, setup):
    """Trains on two ranks, and on one with all the samples; returns how far the weights differ."""
    start(shell, "multinode.py", "2", setup).succeeds()
    start(shell, "multinode.py", "2 --batch_size 64 --snapshot_path one.pt", setup, 1).succeeds()
    return weights_diff(shell, "snapshot.pt", "one.pt")


DICE = "(lambda outputs, targets: dice_loss(outputs.sigmoid(), targets.sigmoid()))"


@pytest.mark.parametrize("name", ["masked_loss", *long("summed_loss", "contrastive_loss", DICE)])
def test_losses_that_are_no_plain_mean(shell, name):
    """With the page's lines, two ranks train as one with all the samples."""
    functions = snippet("losses.md", "def masked_loss", "python")
    setup = LOSSES.format(functions=functions, name=name)
    assert diff_of_two_ranks(shell, setup) < 1e-6


@pytest.mark.long
def test_masked_loss_where_a_rank_has_no_share(shell):
    """With the page's lines in elastic_ddp.py, on three ranks, which share a last batch of two."""
    masked_loss = snippet("losses.md", "def masked_loss", "python")
    setup = LOSSES.format(functions=masked_loss, name="masked_loss")
    setup = f"torch.set_default_dtype(torch.float64)\n{resize(1026)}{setup}"
    start(shell, "multinode.py", "2 --batch_size 64 --snapshot_path one.pt", setup, 1).succeeds()
    source = (ROOT / "elastic_ddp.py").read_text()
    lines = textwrap.indent(snippet("losses.md", "[:size]", "python"), 8 * " ")
    source, count = re.subn(r" +loss = .*\n +\(loss \* .*\n", lines, source)
    assert count == 1
    edited = shell.folder / "edited" / "elastic_ddp.py"
    edited.parent.mkdir()
    edited.write_text(source)
    start(shell, edited, "2", setup, 3).succeeds()
    assert weights_diff(shell, "snapshot.pt", "one.pt") < 1e-12


@pytest.mark.long
def test_contrastive_model(shell):
    """With the page's lines, two ranks train as one with all the samples; the scale, too."""
    imports = "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n"
    parts = [snippet("losses.md", start, "python") for start in ("def gather", "def clip_loss")]
    (shell.folder / "losses.py").write_text(f"{imports}from torch import nn\n" + "".join(parts))
    assert diff_of_two_ranks(shell, read_script("contrastive.py")) < 1e-12
    assert abs(load(shell.folder / "one.pt")["model"]["log_scale"].item() - 2) > 1e-3


def train_agent(shell, path, ranks, killed_at=-1, dtype="float32"):
    return shell.ranks(f"{shell.folder}/ppo.py {path} {killed_at} {dtype}", ranks)


@pytest.mark.long
def test_rollouts(shell):
    """With the page's functions, PPO learns, alike on one and two ranks, and after a kill."""
    functions = snippet("losses.md", "def normalize", "python")
    (shell.folder / "rollouts.py").write_text(functions)
    (shell.folder / "ppo.py").write_text(read_script("ppo.py"))
    output = train_agent(shell, "one.pt", 1, dtype="float64").succeeds()
    train_agent(shell, "two.pt", 2, dtype="float64").succeeds()
    assert weights_diff(shell, "two.pt", "one.pt") < 1e-12
    rewards = [float(reward) for reward in re.findall(r"reward (\S+),", output)]
    assert rewards[-1] > rewards[0] / 2
    assert {"early True", "early False"} <= {*re.findall(r"early \w+", output)}
    train_agent(shell, "straight.pt", 2).succeeds()
    train_agent(shell, "killed.pt", 2, killed_at=7).fails()
    train_agent(shell, "killed.pt", 2).succeeds()
    killed, straight = (load(shell.folder / f"{name}.pt") for name in ("killed", "straight"))
    assert equal_snapshots(killed, straight)


FAILING = """
import errno
def fail(*args, **options):
    raise OSError(errno.ESTALE, "Stale file handle")
"""


@pytest.mark.parametrize(
    "script, call, options",
    [
        ("singlegpu.py", "torch.load", ""),
        ("elastic_ddp.py", "torch.load", ""),
        ("gpt/dcp.py", "os.listdir", f"{GPT} {SHORT_VAL} --generate 0"),
    ],
)
def test_a_passing_error_is_no_missing_snapshot(shell, script, call, options):
    write_text(shell.folder / "text", 100, 8)
    start(shell, script, f"1 {options}", ranks=1).succeeds()
    setup = f"{FAILING}\nscript.{call} = fail"
    assert start(shell, script, f"2 {options}", setup, ranks=1).wait() != 0
    assert load_state(shell.folder, "epochs_run") == 1


# With steps of this length, a signal must be seen after so many of them.
@pytest.mark.parametrize("seconds, steps", first(1, [(0.3, 4), (0.02, 60)], LONG))
def test_a_signal_is_seen_within_a_second(shell, seconds, steps):
    slow = pause(f"{seconds} * int(os.environ['RANK'])")  # rank 0 waits for rank 1
    setup = f"{slow}{SIGNAL.replace('_any_rank_stops', 'no_such_method')}"  # at its own pace
    job = start(shell, "preemptible.py", "9", setup, SIGNAL="15", SIGNAL_AT="0 320")
    job.fails("stopped by a signal")
    snapshot = load(shell.folder / "snapshot.pt")
    seen = snapshot["epochs_run"] * 2048 + snapshot["samples_run"]
    assert 0 < (seen - 320) / 64 <= steps


STEP_CLOCK = read_script("step_clock.py")


# Seconds of a step, by rank; steps; how often of these: the first, and those that follow it.
@pytest.mark.parametrize(
    "seconds, steps, every",
    first(1, [("0.19 0.1 0.1", 88, 5), ("0.001", 640, 100), ("2", 64, 1)], LONG),
)
def test_fast_steps_are_not_slowed_down(shell, seconds, steps, every):
    """It asks whether to stop about once a second, but in every hundredth step at most."""
    ranks = len(seconds.split())
    epochs = steps * ranks // 64
    job = start(shell, "preemptible.py", f"{epochs}", STEP_CLOCK, ranks, SECONDS=seconds)
    assert job.succeeds().count("asked") == ranks * len(range(0, steps, every))


def edited(shell, script, *edits):
    """Writes a copy of a script with edits, each of text that it has once; returns its path."""
    text = (ROOT / script).read_text()
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (shell.folder / "edited").mkdir()
    path = shell.folder / "edited" / Path(script).name
    path.write_text(text)
    return path


def typed(page, start):
    """Returns the code in a page's prose that begins with `start`."""
    (code,) = re.findall(rf"`({re.escape(start)}[^`]*)`", (ROOT / "docs" / page).read_text())
    return code


SAVES = [
    ("preemptible.py", "", 8, 256),
    ("elastic_ddp.py", "", 8, 256),
    ("gpt/pretrain.py", f"{GPT} {SHORT_VAL} --generate 0", 2, 32),
]


@pytest.mark.parametrize("script, options, saves, every", first(1, SAVES, LONG))
def test_saving_by_time(shell, script, options, saves, every):
    """With the page's lines, all ranks save once ten minutes are over by the clock of one."""
    write_text(shell.folder / "text", 100, 8)
    init = "        self.next_check = 1  # step number\n"
    old = re.search(r" {8}values = .*?tolist\(\)", (ROOT / script).read_text(), re.DOTALL)[0]
    path = edited(
        shell,
        script,
        (init, f"{init}        {typed('preemptible.md', 'self.saved_at = ')}\n"),
        (old, textwrap.indent(snippet("preemptible.md", "saved_at", "python"), " " * 8).rstrip()),
    )
    job = start(shell, path, f"1 {options}", STEP_CLOCK, SECONDS="0 200")
    positions = [(0, every * (n + 1)) for n in range(saves)]
    assert logged_positions(job.succeeds()) == [*positions, (1, 0)]


WEIGHTS = "script.ToyDataset.weights = torch.arange(2048.0)\n"
RANDPERM = "torch.randperm(len(self.dataset), generator=generator)"


def draw_by_weight(size, generator):
    return torch.multinomial(torch.arange(float(size)), size, True, generator=generator)


@pytest.mark.parametrize(
    "setup", first(1, [TIME_FIRST, WEIGHTS], LONG), ids=["time_first", "weights"]
)
@pytest.mark.parametrize("script", first(1, ["elastic_ddp.py", "resumable.py"], LONG))
def test_samples_are_counted(shell, script, setup, monkeypatch):
    """Killed within an epoch, resumed at the next sample: along another dimension, or by weight.

    A weighted sampler has the page's line.
    """
    if setup == WEIGHTS:
        line = typed("your_project.md", "torch.multinomial(")
        monkeypatch.setattr(torch, "randperm", draw_by_weight)
        script = edited(shell, script, (RANDPERM, line))
    variables = {"SIGNAL": "9", "SIGNAL_AT": "0 320"}
    options = "2 --save_every_steps 4"
    start(shell, script, options, setup + SIGNAL, **variables).wait()
    assert load(shell.folder / "snapshot.pt")["samples_run"] == 256
    start(shell, script, options, setup).succeeds()
    losses = assert_trained(shell.folder / "snapshot.pt", 2, 64)
    assert load(shell.folder / "snapshot.pt")["loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_lambda_for_data_workers(shell):
    """Of a default start method such as Python 3.14's; from preemptible.py on, workers fork."""
    old = "        num_workers=args.num_workers,\n"
    new = f"{old}        collate_fn=lambda samples: torch.utils.data.default_collate(samples),\n"
    setup = FORK.replace("fork", "forkserver")
    path = edited(shell, "resumable.py", (old, new))
    job = start(shell, path, "1 --num_workers 1", setup, ranks=1)
    job.fails("local object", documented_error("main.<locals>.<lambda>"))


@pytest.mark.long
def test_older_form_of_torchrun(shell):
    """The options that docs/multinode.md names, on two nodes."""
    options = typed("multinode.md", "--master_addr=").replace("HOST", "localhost")
    options = options.replace("29400", str(free_port()))
    command = f"torchrun --nnodes=2 {options} --node_rank=%d {ROOT}/multinode.py 1"
    jobs = [shell.start(command % node) for node in (0, 1)]
    for job in jobs:
        job.succeeds()
    assert_trained(shell.folder / "snapshot.pt", 1, 64)


DROP_LAST = "script.DataLoader = functools.partial(script.DataLoader, drop_last=True)"


@pytest.mark.parametrize(
    "script, setup", [("singlegpu.py", resize(20) + DROP_LAST), ("elastic_ddp.py", resize(0))]
)
def test_data_without_a_batch(shell, script, setup):
    job = start(shell, script, "1", setup, ranks=1)
    assert job.wait() != 0
    assert "0 of 1 epochs done, 0 steps per epoch" in job.output
    assert documented_error("division by zero") in job.output
    assert not (shell.folder / "snapshot.pt").exists()


def test_text_is_sampled_without_dropout(shell):
    setup = "script.GPT.generate = lambda model, *arguments: f'in training: {model.training}'"
    write_text(shell.folder / "text", 8, 8)
    output = start(shell, "gpt/gpt.py", f"1 {GPT} --generate 4", setup).succeeds()
    assert "in training: False" in output


@pytest.mark.parametrize("name", first(0, [n for n in NAMES if n.startswith(("recipes/", "gpt/"))]))
def test_with_a_frozen_layer(shell, name):
    options = f"1 1 {options_of(shell, name)} --snapshot_path {shell.folder}/s"
    start(shell, name, options, read_script("freeze.py")).succeeds()


LATER = read_script("later_layer.py")


@pytest.mark.parametrize("script", long("gpt/fsdp.py", "gpt/muon.py", "gpt/local_sgd.py"))
def test_weight_without_a_gradient_yet(shell, script):
    """It is resumed, bit for bit, and said; a weight that a snapshot lacks is an error."""
    write_text(shell.folder / "text", 100, 8)
    options = f"2 1 {GPT} {SHORT_VAL} --generate 0 --snapshot_path"
    start(shell, script, f"{options} whole", LATER).succeeds()
    stop = {"SIGNAL": "9", "SIGNAL_AT": "1 0"}
    assert start(shell, script, f"{options} s", LATER + SIGNAL, **stop).wait() == -signal.SIGKILL
    job = start(shell, script, f"{options} s", LATER + LATER.replace("later", "more"))
    job.fails("Missing key in checkpoint state_dict: ", "model.blocks.0.more.weight")
    output = start(shell, script, f"{options} s", LATER).succeeds()
    said = "has no optimizer state of blocks.0.later.weight: it had no gradient yet"
    assert output.count("has no optimizer state") == output.count(said) == 1
    assert_equal(shell.folder / "whole", shell.folder / "s")
