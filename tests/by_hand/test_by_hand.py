"""by_hand/ against what it replaces: the same weights and snapshots as with the library."""

import re
import statistics

import pytest
from helpers import LONG, MEASURE_MEMORY, first, patch, read_script, resize, start

from bench.overlap import FORMS, source
from tools.launch.snapshots import load, max_abs_diff
from tools.steps import ROOT

BLOCK = f"sys.path.insert(0, {str(ROOT)!r})\n{read_script('gpt_block.py')}"
OWN_WEIGHTS = read_script("own_weights.py")
DEEP = read_script("deep.py")
MODELS = {"toy": OWN_WEIGHTS, "block": BLOCK + OWN_WEIGHTS, "deep": DEEP + OWN_WEIGHTS}
ADAMW = "torch.optim.SGD = lambda parameters, **options: torch.optim.AdamW(parameters)\n"
NO_STATE = """
SGD = torch.optim.SGD
torch.optim.SGD = lambda parameters, **options: SGD(parameters, lr=0.01)
"""
TWO_GROUPS = """
SGD = torch.optim.SGD
def two_groups(parameters, lr, momentum):
    parameters = list(parameters)
    return SGD([{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 0.1}], lr, momentum)
torch.optim.SGD = two_groups
"""


def train(shell, setup, name, *runs, epochs=1):
    """Trains epochs of 8 steps in each run, from one snapshot to the next.

    A run is a script and its number of ranks. Returns the weights and the optimizer's state.
    """
    for number, (script, ranks) in enumerate(runs, 1):
        path = patch(shell.folder, script, resize(512) + setup)
        batch_size = 64 if script == TP else 64 // ranks
        command = f"{path} {number * epochs} 1 --batch_size {batch_size} --snapshot_path {name}"
        job = shell.start(f"python {command}") if script == ONE else shell.ranks(command, ranks)
        job.succeeds()
    snapshot = load(shell.folder / name)
    states = [
        value for state in snapshot["optimizer"]["state"].values() for value in state.values()
    ]
    return [*snapshot["model"].values(), *states]


ONE = "singlegpu.py"
DDP = "multigpu_torchrun.py"
FSDP = "recipes/fsdp.py"
DDP_BY_HAND = "by_hand/ddp.py"
ZERO = "by_hand/zero.py"
FSDP_BY_HAND = "by_hand/fsdp.py"
TP = "by_hand/tensor_parallel.py"


@pytest.mark.parametrize(
    ("form", "model", "dtype", "ranks"),
    [
        ("after backward()", "toy", "float64", 2),
        ("buckets", "block", "float64", 2),
        pytest.param("a hook each", "block", "float64", 2, marks=LONG),
        pytest.param("buckets", "block", "float32", 4, marks=LONG),
    ],
)
def test_ddp(shell, form, model, dtype, ranks):
    """Each form on the page, interrupted after an epoch, is torch's DDP left alone."""
    setup = f"torch.set_default_dtype(torch.{dtype})\n{MODELS[model]}"
    expected = train(shell, setup, "torch", (DDP, ranks), epochs=2)
    if form != "buckets":
        setup += f"dist = script.dist\n{source(form)}\n"
        setup += "script.DistributedDataParallel = DistributedDataParallel\n"
    found = train(shell, setup, "ours", (DDP_BY_HAND, ranks), (DDP_BY_HAND, ranks))
    assert max_abs_diff(found, expected) < (1e-12 if dtype == "float64" else 1e-6)


SHARDS = {  # the library, and scripts that resume each other
    "zero": (DDP, [(ZERO, 4), (ZERO, 2)], "toy", "float64", ADAMW),
    "fsdp": (FSDP, [(FSDP_BY_HAND, 4), (FSDP_BY_HAND, 2)], "toy", "float64", ADAMW),
    "groups": (DDP, [(ZERO, 2), (FSDP_BY_HAND, 2)], "toy", "float64", TWO_GROUPS),
    "ddp-zero": (DDP, [(DDP, 2), (ZERO, 4)], "block", "float32", NO_STATE),
    "fsdp-ddp": (FSDP, [(FSDP_BY_HAND, 2), (DDP, 4)], "block", "float64", ""),
    "zero-fsdp": (FSDP, [(ZERO, 2), (FSDP_BY_HAND, 4)], "block", "float32", ""),
}


@pytest.mark.parametrize(
    ("library", "runs", "model", "dtype", "optimizer"),
    first(3, [*SHARDS.values()], LONG),
    ids=SHARDS,
)
def test_shards(shell, library, runs, model, dtype, optimizer):
    """Snapshots fit any number of ranks, and torch's DDP: it resumes, and is resumed."""
    setup = f"torch.set_default_dtype(torch.{dtype})\n{MODELS[model]}{optimizer}"
    expected = train(shell, setup, "torch", (library, 2), epochs=len(runs))
    found = train(shell, setup, "ours", *runs)
    assert max_abs_diff(found, expected) < (1e-12 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize(
    ("runs", "model", "dtype", "optimizer"),
    [
        ([(TP, 5), (TP, 2)], "deep", "float64", ADAMW),
        ([(DDP, 4), (TP, 2)], "deep", "float32", ""),
        pytest.param([(TP, 2), (ONE, 1), (TP, 5)], "toy", "float64", "", marks=LONG),
    ],
    ids=["deep", "float32", "toy"],
)
def test_tensor_parallel(shell, runs, model, dtype, optimizer):
    """All ranks take the same batch, as one process does, and resume its snapshots."""
    setup = f"torch.set_default_dtype(torch.{dtype})\n{MODELS[model]}{optimizer}"
    expected = train(shell, setup, "one", (DDP, 1), epochs=len(runs))
    found = train(shell, setup, "ours", *runs)
    assert max_abs_diff(found, expected) < (1e-12 if dtype == "float64" else 1e-6)


def test_tensor_parallel_on_ranks_that_divide_no_layer(shell):
    shell.ranks(f"{TP} 1", 4).fails("--nproc_per_node must divide 10, the size of a sharded layer")


WIDTH, LAYERS = 1536, 8  # of measure_held.py
MEASURE_HELD = MEASURE_MEMORY + read_script("measure_held.py")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "parts"),
    [(DDP_BY_HAND, [1, 1, 2]), (ZERO, [1, 1 / 4, 1 / 2]), (FSDP_BY_HAND, [1 / 4, 1 / 4, 1 / 2])],
)
def test_memory(shell, script, parts):
    """Of weights, gradients and AdamW's state, a rank of four holds all or a quarter.

    The median of the ranks: at times, some of them hold a message more. While a layer of fsdp.py
    computes, a rank has the whole of it as well.
    """
    output = start(shell, script, "1 1 --batch_size 1", MEASURE_HELD, 4).succeeds()
    found = [list(map(int, line.split())) for line in re.findall(r"held (.+)", output)]
    assert len(found) == 4
    growths = [(built, before - built, after - before) for built, before, after in found]
    print(growths)
    medians = [statistics.median_low(sizes) for sizes in zip(*growths, strict=True)]
    layer = 4 * WIDTH**2
    assert medians == pytest.approx([part * LAYERS * layer for part in parts], rel=0.15)
    if script == FSDP_BY_HAND:
        forward = [int(size) for size in re.findall(r"forward (\d+)", output)]
        print(forward)
        assert forward == pytest.approx([LAYERS * layer / 4 + layer] * 4 * LAYERS, rel=0.1)
        # At the end: all shards, their gradients, and a layer's weights and gradients; no more.
        backward = [int(size) for size in re.findall(r"backward (\d+)", output)]
        assert statistics.median(sorted(backward)[-4:]) < (2 * LAYERS / 4 + 2.5) * layer


@pytest.mark.parametrize(
    ("script", "member", "message"),
    [
        (DDP_BY_HAND, "nn.Parameter(torch.zeros(1))", "each parameter must get one gradient"),
        (FSDP_BY_HAND, "nn.Parameter(torch.zeros(1))", "each weight must be in one layer"),
        (FSDP_BY_HAND, "nn.BatchNorm1d(5)", "and a buffer in none"),
    ],
)
def test_refused_models(shell, script, member, message):
    """An unused parameter, or what no layer shards: it would be trained wrongly, or not at all."""
    setup = MODELS["toy"].replace("        with", f"        self.more = {member}\n        with")
    job = start(shell, script, "1", setup)
    assert job.wait() != 0 and message in job.output, job.output


def test_when_the_all_reduces_run(shell):
    """After backward(), or while it goes on; bench/overlap.py measures what that gains."""
    output = shell.ranks("bench/overlap.py 2 1", 2).succeeds()
    found = re.findall(r"(.+): \d+ ms .* of (\d+) all-reduces, (\d+) begin in backward", output)
    assert [form for form, _, _ in found] == FORMS
    assert [int(count) for _, count, _ in found] == [16, 16, 2]
    assert [early != "0" for _, _, early in found] == [False, True, True]
