"""What monitor.py and stragglers.py log: a plain loop's numbers, slow data, which rank is slow."""

import re
import socket

import pytest
import torch
from helpers import patch
from test_recipes import curves
from torch import nn

import singlegpu

# The ranks train on 2048 samples, 64 per step; loading those of rank 1 takes it 32 ms per step.
SLOW_DATA = """
class SlowDataset(script.ToyDataset):
    def __getitem__(self, index):
        if os.environ["RANK"] == "1":
            time.sleep(0.001)
        return super().__getitem__(index)
script.ToyDataset = SlowDataset
"""

# The forward pass takes 20 ms, that of the slow rank 25 ms: it has 0.8 times the speed. The wait
# for most of it leaves the cores to the other ranks: with more ranks than cores, all would be slow.
SLOW_RANK = """
class SlowModel(script.ToyModel):
    def forward(self, inputs):
        ms = 25 if os.environ["RANK"] == os.environ.get("SLOW_RANK") else 20
        end = time.perf_counter() + ms / 1000
        time.sleep(0.95 * ms / 1000)
        while time.perf_counter() < end:
            torch.mm(WEIGHT, WEIGHT)
        return super().forward(inputs)

WEIGHT = torch.ones(30, 30)
script.ToyModel = SlowModel
"""


def logged(output):
    """Returns the numbers of each line by name, and what it says of a rank, by step."""
    lines = re.findall(r"^step (\d+) \| (.*) \| (\w+: rank .*)$", output, re.MULTILINE)
    return {
        int(step): ({k: float(v) for k, v in re.findall(r"(\w+) (\S+)", values)}, named)
        for step, values, named in lines
    }


def plain_loop(steps):
    """Returns the loss and the norm of the gradient of each step, in one process without DDP."""
    dataset = singlegpu.ToyDataset(2048)
    torch.manual_seed(0)
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    found = []
    for batch in order.split(64)[:steps]:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(dataset.inputs[batch]), dataset.targets[batch])
        loss.backward()
        optimizer.step()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        found.append((loss.item(), norm.item()))
    return found


def test_numbers_of_a_run_with_slow_data(shell):
    """stragglers.py and, in it, monitor.py log the plain loop's numbers, and rank 1 is slow."""
    script = patch(shell.folder, "recipes/stragglers.py", SLOW_DATA)
    lines = logged(shell.ranks(f"{script} 1 --log_every 16", 2).succeeds())
    assert list(lines) == [16, 32]
    reference = plain_loop(32)
    for step, (numbers, named) in lines.items():
        loss, norm = reference[step - 1]
        assert numbers["loss"] == pytest.approx(loss, rel=1e-3)
        assert numbers["gradient_norm"] == pytest.approx(norm, rel=1e-3)
        assert numbers["learning_rate"] == 0.01
        assert 50 < numbers["samples_per_second"] < 64 / 0.032
        assert 0.05 < numbers["peak_memory_gb"] < 5
        assert 0.4 < numbers["data_share"] <= 1
        assert numbers["median_rank_ms"] < 32 < numbers["slowest_rank_ms"]
        assert named == f"straggler: rank 1 on {socket.gethostname()}"
    drawn = curves(shell.folder / "snapshot.pt.logs")
    assert drawn.keys() == lines[16][0].keys()
    for name, points in drawn.items():
        printed = {step: numbers[name] for step, (numbers, _) in lines.items()}
        assert dict(points) == pytest.approx(printed, rel=1e-4)
    resumed = logged(shell.ranks(f"{script} 2 --log_every 20", 2).succeeds())
    assert list(resumed) == [40, 60]
    for numbers, _ in resumed.values():  # of 40, over 8 steps: none counts those of the run before
        assert 50 < numbers["samples_per_second"] < 64 / 0.032


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("is_slow", [True, False])
def test_slow_rank_is_named(shell, is_slow):
    """In 10 of 10 runs of 100 steps on three ranks; and no rank is, in 10 of 10 without."""
    script = patch(shell.folder, "recipes/stragglers.py", SLOW_RANK)
    for run in range(10):
        variables = {"SLOW_RANK": str(run % 3)} if is_slow else {}
        command = f"{script} 1 --batch_size 6 --snapshot_path {run}.pt"  # 114 steps
        output = shell.ranks(command, 3, **variables).succeeds()
        assert list(logged(output)) == [50, 100]
        named = set(re.findall(r"straggler: rank (\d)", output))
        assert named == set(variables.values()), output
