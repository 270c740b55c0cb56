"""The recipe for images: resumed bit for bit, evaluated as by one process; the page's traps."""

import re
import signal

import pytest
import torch
from helpers import ROOT, equal_snapshots, load, max_abs_diff, patched

from recipes.images import ConvNet, Digits, RandomShift

SCRIPT = "recipes/images.py"
PAGE = (ROOT / "docs/recipes/images.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```.*?^```text\n(.*?)^```", PAGE, re.S | re.M)
# Data workers are forked, as they are under torchrun; a rank of `helpers.Ranks` would spawn them.
FORK = """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)
"""
# Kills every rank in an epoch.
KILL = """
run_batch = script.Trainer._run_batch
def run_batch_or_die(self, inputs, targets):
    self.batches = getattr(self, "batches", 0) + 1
    if str(self.batches) == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), 9)
    run_batch(self, inputs, targets)
script.Trainer._run_batch = run_batch_or_die
"""


def write(shell, name, source):
    path = shell.folder / name
    path.write_text(source)
    return path


def assert_evaluated(output, path):
    """Asserts that the last val loss and accuracy of a log are those of the snapshot."""
    model = ConvNet().eval()
    model.load_state_dict(load(path)["model"])
    digits = Digits()
    val = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1438:]
    with torch.no_grad():
        outputs = model(digits.inputs[val])
    loss = torch.nn.functional.cross_entropy(outputs, digits.targets[val]).item()
    accuracy = (outputs.argmax(1) == digits.targets[val]).double().mean().item()
    logged = re.findall(r"val loss (\S+), accuracy (\S+)% of 359 samples", output)[-1]
    assert float(logged[0]) == pytest.approx(loss, rel=1e-5)
    assert float(logged[1]) == pytest.approx(100 * accuracy, abs=0.01)
    assert accuracy > 0.8


def test_killed_is_uninterrupted(shell):
    """Also with other numbers of data workers; a snapshot is evaluated as by one process."""
    script = write(shell, "patched.py", patched(SCRIPT, FORK + KILL))
    command = f"{script} 3 1 --snapshot_path"
    uninterrupted = shell.ranks(f"{command} uninterrupted", 2)
    killed = shell.ranks(f"{command} s --num_workers 2", 2, KILL_AT="40")  # in epoch 1 of 0 to 2
    assert killed.wait() == -signal.SIGKILL
    output = shell.ranks(f"{command} s", 2).succeeds()
    assert "1 of 3 epochs done" in output
    uninterrupted.succeeds()
    snapshot = load(shell.folder / "s")
    assert equal_snapshots(load(shell.folder / "uninterrupted"), snapshot)
    assert_evaluated(output, shell.folder / "s")


@pytest.mark.long
def test_group_norm_is_one_process(shell):
    """Two ranks train as one process with GroupNorm, and not with BatchNorm."""
    source = (ROOT / SCRIPT).read_text()
    batch_norm = write(shell, "batch_norm.py", source)
    group_norm = write(shell, "group_norm.py", source.replace("BatchNorm2d(", "GroupNorm(4, "))
    for script, low, high in [(batch_norm, 0.001, 1), (group_norm, 0, 1e-5)]:
        weights = []
        for ranks in (1, 2):
            path = f"{script.stem}_{ranks}"
            options = f"--batch_size {64 // ranks} --snapshot_path {path}"
            shell.ranks(f"{script} 2 2 {options}", ranks).succeeds()
            snapshot = load(shell.folder / path)["model"]
            weights.append([t for name, t in snapshot.items() if name.endswith("weight")])
        assert low <= max_abs_diff(*weights) < high, script


def test_shifts_depend_on_sample_and_epoch():
    """All nine shifts are equally frequent; in the same epoch, a sample always has the same one."""
    image = torch.arange(1.0, 65).view(1, 8, 8)
    samples = RandomShift([(image, 0)] * 900, seed=3)
    shifts = [int(samples[1, index][0][0, 3, 3]) for index in range(900)]
    expected = {int(image[0, 3 + y, 3 + x]) for y in (-1, 0, 1) for x in (-1, 0, 1)}
    assert set(shifts) == expected
    assert all(60 < shifts.count(shift) < 140 for shift in expected)
    assert shifts == [int(samples[1, index][0][0, 3, 3]) for index in range(900)]
    others = [int(samples[2, index][0][0, 3, 3]) for index in range(900)]
    assert 60 < sum(map(int.__eq__, shifts, others)) < 140


@pytest.mark.parametrize(
    ("number", "ranks", "change", "error"),
    [
        (0, 1, ("", ""), None),
        (1, 2, ("", ""), None),
        (2, 2, ("seconds=5", "seconds=1"), "Timed out waiting"),
        (2, 2, ("model(inputs)", "model.module(inputs)"), None),
    ],
)
def test_traps(shell, number, ranks, change, error):
    """The page's scripts print what it shows, or hang; with the mend, they do not."""
    source, shown = SNIPPETS[number]
    assert change[0] in source
    job = shell.ranks(str(write(shell, "trap.py", FORK + source.replace(*change))), ranks)
    if error:
        assert job.wait() != 0 and error in job.output, job.output
    else:
        output = job.succeeds()
        assert number == 2 or sorted(output.splitlines()) == sorted(shown.splitlines())


REFUSED = """
import torch
from torch import nn
torch.distributed.init_process_group("gloo")
for norm in (nn.SyncBatchNorm(32), nn.BatchNorm1d(32)):
    try:
        norm(torch.randn(1, 32))
    except ValueError as error:
        print(f"ValueError: {error}")
"""


def test_what_torch_refuses(shell):
    """SyncBatchNorm on a CPU, and a batch of one sample."""
    errors = shell.ranks(str(write(shell, "refused.py", REFUSED))).succeeds().splitlines()
    assert len(errors) == 2 and set(errors) <= set(PAGE.splitlines())
