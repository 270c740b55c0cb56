"""by_hand/ against what it replaces: the same weights and snapshots as with the library."""

import re
import sys

import pytest
from helpers import MEASURE_MEMORY, ROOT, load, max_abs_diff, patched

sys.path.insert(0, str(ROOT / "bench"))
from overlap import FORMS, source

# A GPT's block, in many small buckets.
BLOCK = f"""
sys.path.insert(0, {str(ROOT)!r})
from gpt.gpt import Block

class Model(nn.Sequential):
    def __init__(self):
        tokens = [nn.Linear(10, 64), nn.Unflatten(1, (4, 16))]
        super().__init__(*tokens, Block(2, 16), nn.Flatten(), nn.Linear(64, 5))

script.ToyModel = Model
script.BUCKET_SIZE = 50
"""
# Each rank begins with other weights, so that those of rank 0 must be broadcast.
OWN_WEIGHTS = """
class OwnModel(script.ToyModel):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.01 * int(os.environ["RANK"])

script.ToyModel = OwnModel
"""
MODELS = {"toy": OWN_WEIGHTS, "block": BLOCK + OWN_WEIGHTS}


ADAMW = "torch.optim.SGD = lambda parameters, **options: torch.optim.AdamW(parameters)\n"


def train(shell, setup, name, *runs):
    """Trains an epoch in each run, a script and its number of ranks, from one snapshot to the next.

    Returns the weights and the optimizer's state.
    """
    path = shell.folder / "script.py"
    for total, (script, ranks) in enumerate(runs, 1):
        path.write_text(patched(script, setup))
        command = f"{path} {total} 1 --batch_size {64 // ranks} --snapshot_path {name}"
        shell.ranks(command, ranks).succeeds()
    snapshot = load(shell.folder / name)
    states = [
        value for state in snapshot["optimizer"]["state"].values() for value in state.values()
    ]
    return [*snapshot["model"].values(), *states]


DDP, BY_HAND, ZERO = "multigpu_torchrun.py", "by_hand/ddp.py", "by_hand/zero.py"


@pytest.mark.parametrize(
    ("form", "model", "dtype", "ranks"),
    [
        ("after backward()", "toy", "float64", 4),
        ("a hook each", "block", "float64", 2),
        ("buckets", "toy", "float64", 4),
        ("buckets", "block", "float64", 2),
        ("buckets", "toy", "float32", 2),
        ("buckets", "block", "float32", 4),
    ],
)
def test_ddp(shell, form, model, dtype, ranks):
    """Each form on the page, interrupted after an epoch, is torch's DDP left alone."""
    setup = f"torch.set_default_dtype(torch.{dtype})\n{MODELS[model]}"
    expected = train(shell, setup, "torch", (DDP, ranks), (DDP, ranks))
    if form != "buckets":
        setup += f"dist = script.dist\n{source(form)}\n"
        setup += "script.DistributedDataParallel = DistributedDataParallel\n"
    found = train(shell, setup, "ours", (BY_HAND, ranks), (BY_HAND, ranks))
    assert max_abs_diff(found, expected) < (1e-12 if dtype == "float64" else 1e-6)


@pytest.mark.parametrize(
    ("runs", "model", "dtype", "optimizer"),
    [
        ([(ZERO, 4), (ZERO, 2)], "toy", "float64", ADAMW),
        ([(ZERO, 2), (DDP, 4)], "block", "float64", ADAMW),
        ([(DDP, 2), (ZERO, 4)], "block", "float32", ""),
    ],
)
def test_zero(shell, runs, model, dtype, optimizer):
    """Snapshots fit any number of ranks, and torch's DDP: it resumes, and is resumed."""
    setup = f"torch.set_default_dtype(torch.{dtype})\n{MODELS[model]}{optimizer}"
    expected = train(shell, setup, "torch", *[(DDP, ranks) for _, ranks in runs])
    found = train(shell, setup, "ours", *runs)
    assert max_abs_diff(found, expected) < (1e-12 if dtype == "float64" else 1e-6)


# Each rank prints how far its memory grows in the optimizer's first step, which makes its state.
WIDTH = 1500
MEASURE_STATE = f"""{MEASURE_MEMORY}
script.ToyModel = lambda: nn.Sequential(nn.Linear(10, {WIDTH}), *[nn.Linear({WIDTH}, {WIDTH}),
    nn.Linear({WIDTH}, 5)])

parameter = nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.AdamW([parameter]).step()  # loads what it needs

class AdamW(torch.optim.AdamW):
    def step(self):
        before = memory("VmRSS:")
        super().step()
        print("state", memory("VmRSS:") - before)
        self.step = super().step

torch.optim.SGD = lambda parameters, **options: AdamW(parameters)
"""


@pytest.mark.parametrize(("script", "shards"), [(DDP, 1), (ZERO, 4)])
def test_optimizer_state(shell, script, shards):
    """Two numbers for each weight, of which a rank of zero.py has a quarter."""
    path = shell.folder / "script.py"
    path.write_text(patched(script, MEASURE_STATE))
    output = shell.ranks(f"{path} 1 1 --batch_size 512", 4).succeeds()
    weights = 10 * WIDTH + WIDTH + WIDTH * WIDTH + WIDTH + WIDTH * 5 + 5
    measured = [int(size) for size in re.findall(r"state (\d+)", output)]
    print(measured, 8 * weights / shards)
    assert measured == pytest.approx([8 * weights / shards] * 4, rel=0.1)


def test_parameter_without_gradient(shell):
    """It is refused, as by DDP, where the last step's gradients would otherwise be averaged."""
    unused = "        self.unused = nn.Parameter(torch.zeros(1))\n"
    setup = MODELS["toy"].replace("        with torch", f"{unused}        with torch")
    path = shell.folder / "script.py"
    path.write_text(patched("by_hand/ddp.py", setup))
    job = shell.ranks(f"{path} 1", 2)
    assert job.wait() != 0
    assert "between two steps, each parameter must get one gradient" in job.output


def test_when_the_all_reduces_run(shell):
    """After backward(), or while it goes on; bench/overlap.py measures what that gains."""
    output = shell.ranks("bench/overlap.py --blocks 2 --steps 1", 2).succeeds()
    found = re.findall(r"(.+): \d+ ms .* of (\d+) all-reduces, (\d+) begin in backward", output)
    assert [form for form, _, _ in found] == FORMS
    assert [int(count) for _, count, _ in found] == [16, 16, 2]
    assert [early != "0" for _, _, early in found] == [False, True, True]
