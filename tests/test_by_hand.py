"""by_hand/ against what it replaces: the same weights and snapshots as with the library."""

import re
import sys

import pytest
from helpers import ROOT, max_abs_diff, patched, weights_and_momentum

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


def train(shell, script, setup, ranks, totals):
    """Trains to each of the numbers of epochs; returns weights and momentum."""
    path = shell.folder / "script.py"
    path.write_text(patched(script, setup))
    snapshot = f"{script.replace('/', '_')}.snapshot"
    for total in totals:
        command = f"{path} {total} 1 --batch_size 64 --snapshot_path {snapshot}"
        shell.ranks(command, ranks).succeeds()
    weights, momentum = weights_and_momentum(shell.folder / snapshot)
    return weights + momentum


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
    expected = train(shell, "multigpu_torchrun.py", setup, ranks, [2])
    if form != "buckets":
        setup += f"dist = script.dist\n{source(form)}\n"
        setup += "script.DistributedDataParallel = DistributedDataParallel\n"
    diff = max_abs_diff(train(shell, "by_hand/ddp.py", setup, ranks, [1, 2]), expected)
    print(diff)
    assert diff < (1e-12 if dtype == "float64" else 1e-6)


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
