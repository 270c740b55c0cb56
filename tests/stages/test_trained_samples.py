"""The position counts the samples that were drawn, the mean loss those that were trained."""

import re

import pytest
import torch
from helpers import (
    DROPOUT,
    KILL,
    LOG_LOSSES,
    LONG,
    assert_equal,
    first,
    logged_losses,
    patch,
    resize,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import singlegpu
from tools.launch.snapshots import equal_snapshots, load, logged_positions

SIZE = 201  # samples: on two ranks, the last batches are of 5 and 4, and one of them is padded
KEPT = 0.3  # samples whose first number is larger are dropped: 38 % of them
DROPPING = f"""
def drop(samples):
    kept = [sample for sample in samples if sample[0][0] <= {KEPT}]
    return torch.utils.data.default_collate(kept)

script.DataLoader = functools.partial(script.DataLoader, collate_fn=drop)
"""
DROP_LAST = """
script.DataLoader = functools.partial(script.DataLoader, drop_last=True)
"""
RECIPES = ["recipes/gradient_accumulation.py", "recipes/fsdp.py"]
RESUMED = ["elastic_ddp.py", "preemptible.py", "resumable.py"]


def losses_of_plain_loop(epochs, kept=torch.inf, drop_last=False):
    """Returns the mean losses of the samples that two ranks train, in batches of up to 32."""
    dataset = singlegpu.ToyDataset(SIZE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    samplers = [DistributedSampler(dataset, 2, rank, seed=0) for rank in range(2)]
    losses = []
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        of_samples = []
        loaders = [DataLoader(dataset, 32, sampler=s, drop_last=drop_last) for s in samplers]
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            for inputs, targets in batches:
                chosen = inputs[:, 0] <= kept
                errors = (model(inputs[chosen]) - targets[chosen]) ** 2
                (errors.mean() / 2).backward()  # the mean over the ranks
                of_samples += errors.mean(dim=1).tolist()
            optimizer.step()
        losses.append(sum(of_samples) / len(of_samples))
    return losses


@pytest.mark.parametrize(
    "script", first(1, ["resumable.py", "multigpu_torchrun.py", *RECIPES], LONG)
)
@pytest.mark.parametrize(
    "setup, options",
    [(DROPPING, {"kept": KEPT}), (DROP_LAST, {"drop_last": True})],
    ids=["dropping_collate", "drop_last"],
)
def test_mean_loss(shell, script, setup, options):
    setup = resize(SIZE) + setup + LOG_LOSSES.replace("{self.samples_run}", "0")
    output = shell.ranks(f"{patch(shell.folder, script, setup)} 3 1", 2).succeeds()
    losses = [loss for _, loss in sorted(logged_losses(output).items())]
    assert losses == pytest.approx(losses_of_plain_loop(3, **options), rel=1e-5)


@pytest.mark.parametrize(
    "setup", first(1, [DROPPING, ""], LONG), ids=["dropping_collate", "padded"]
)
@pytest.mark.parametrize("script", first(1, RESUMED, LONG))
def test_killed(shell, script, setup):
    """With dropout, a run that was killed within an epoch ends as one that was not, bit for bit."""
    path = patch(shell.folder, script, resize(SIZE) + DROPOUT + setup + KILL)
    options = "3 3 --save_every_steps 2"
    output = shell.ranks(f"{path} {options} --snapshot_path straight.pt", 2).succeeds()
    positions = logged_positions(output)
    assert (0, 128) in positions and (1, 64) not in positions
    assert all(samples <= SIZE for _, samples in positions)
    assert shell.ranks(f"{path} {options}", 2, KILL_AT="4").wait() != 0
    assert load(shell.folder / "snapshot.pt")["samples_run"] == 128
    shell.ranks(f"{path} {options}", 2).succeeds()
    assert_equal(shell.folder / "straight.pt", shell.folder / "snapshot.pt")


@pytest.mark.parametrize("script", first(1, ["resumable.py", "elastic_ddp.py"], LONG))
def test_totals_of_a_resumed_run(shell, script):
    """Where both save after the same steps, the loss so far is equal, too."""
    path = patch(shell.folder, script, DROPOUT + DROPPING + KILL)
    options = "1 1 --save_every_steps 8"
    for name, kills in (("straight", [22]), ("killed", [14, 14])):
        for step in kills:
            job = shell.ranks(f"{path} {options} --snapshot_path {name}.pt", 2, KILL_AT=str(step))
            assert job.wait() != 0
    straight, killed = (load(shell.folder / f"{name}.pt") for name in ("straight", "killed"))
    assert straight["samples_run"] > 0 and straight["totals"][1] < straight["samples_run"]
    assert equal_snapshots(straight, killed)


@pytest.mark.parametrize("steps", first(1, [16, 32], LONG), ids=["within_an_epoch", "at_its_end"])
def test_snapshot_of_version_1_1(shell, steps):
    """It has the mean loss alone; one at the end of an epoch leaves nothing to train there."""
    path = patch(shell.folder, "resumable.py", KILL)
    job = shell.ranks(f"{path} 2 1 --save_every_steps {steps}", 2, KILL_AT=str(steps + 2))
    assert job.wait() != 0
    snapshot = load(shell.folder / "snapshot.pt")
    if steps == 32:
        snapshot |= {"epochs_run": 0, "samples_run": 2048, "loss": 10.0}
    del snapshot["totals"]
    torch.save(snapshot, shell.folder / "snapshot.pt")
    output = shell.ranks("resumable.py 2 1", 2).succeeds()
    unbroken = shell.ranks("multinode.py 1 1 --snapshot_path unbroken.pt", 2).succeeds()
    (loss,) = re.findall(r"epoch 1 \+ 0 samples \| loss (\S+)", output)
    (expected,) = re.findall(r"epoch 1 \| loss (\S+)", unbroken)
    assert loss == ("10" if steps == 32 else expected)
