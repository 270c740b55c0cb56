"""The recipe for images: resumed bit for bit, evaluated as by one process; the page's traps."""

import random
import re
import signal

import pytest
import torch
from helpers import ROOT, SIGNAL, equal_snapshots, load, max_abs_diff, patched, position
from sklearn.datasets import load_digits

from recipes.images import ConvNet, RandomShift

SCRIPT = "recipes/images.py"
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```.*?^```text\n(.*?)^```",
    (ROOT / "docs/recipes/images.md").read_text(),
    re.DOTALL | re.MULTILINE,
)
# Data workers are forked, as they are under torchrun; a rank of `helpers.Ranks` would spawn them.
FORK = """
import multiprocessing
multiprocessing.set_start_method("fork", force=True)
"""


def write(shell, name, source):
    path = shell.folder / name
    path.write_text(source)
    return path


def evaluated(path):
    """Returns val loss and accuracy of a snapshot, computed at once and without any loader."""
    model = ConvNet().eval()
    model.load_state_dict(load(path)["model"])
    digits = load_digits()
    val = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1438:]
    images = torch.tensor(digits.images).float()[val].unsqueeze(1) / 16
    targets = torch.tensor(digits.target)[val]
    with torch.no_grad():
        outputs = model(images)
    loss = torch.nn.functional.cross_entropy(outputs, targets).item()
    return loss, (outputs.argmax(1) == targets).double().mean().item()


def assert_evaluated(output, path):
    """Asserts that the last val loss and accuracy of a log are those of the snapshot."""
    logged = re.findall(r"val loss (\S+), accuracy (\S+)% of 359 samples", output)[-1]
    loss, accuracy = evaluated(path)
    assert float(logged[0]) == pytest.approx(loss, rel=1e-5)
    assert float(logged[1]) == pytest.approx(100 * accuracy, abs=0.01)
    return accuracy


def assert_same_run(one, other):
    """Asserts that weights, BatchNorm's buffers, optimizer and position are equal, bit for bit."""
    one, other = load(one), load(other)
    assert one["loss"] == pytest.approx(other.pop("loss"), rel=1e-6)  # summed in another order
    del one["loss"]
    assert equal_snapshots(one, other)


def test_interrupted_is_uninterrupted(shell):
    """Stopped in one epoch and killed in the next, with other numbers of data workers each time."""
    script = write(shell, "patched.py", patched(SCRIPT, FORK + SIGNAL))
    command = f"{script} 2 1 --batch_size 64 --save_every_steps 4 --snapshot_path"
    uninterrupted = shell.ranks(f"{command} uninterrupted", 2)
    stopped = shell.ranks(f"{command} s --num_workers 2", 2, SIGNAL="15", SIGNAL_AT="0 256")
    stopped.fails("stopped by a signal")
    assert position(shell.folder / "s") == (0, 5 * 128)
    killed = shell.ranks(f"{command} s", 2, SIGNAL="9", SIGNAL_AT="1 768")
    assert killed.wait() == -signal.SIGKILL
    epochs, samples = position(shell.folder / "s")
    assert epochs == 1 and 0 < samples < 768
    output = shell.ranks(f"{command} s --num_workers 2", 2).succeeds()
    uninterrupted.succeeds()
    assert_same_run(shell.folder / "uninterrupted", shell.folder / "s")
    assert_evaluated(output, shell.folder / "s")


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_interrupted_under_torchrun(shell, workers):
    """Five times, at random steps; torchrun signals the data workers, too. It learns."""
    script = write(shell, "patched.py", patched(SCRIPT, SIGNAL))
    command = f"torchrun --standalone --nproc_per_node=2 {script} 20 5 --num_workers {workers}"
    for part in range(0, 20 * 22, 88):
        step = random.randrange(part, part + 80)  # after it, at most five steps until it stops
        at = f"{step // 22} {step % 22 * 64}"
        signum = random.choice([signal.SIGTERM, signal.SIGKILL])
        job = shell.start(
            f"{command} --save_every_steps 7 --snapshot_path s",
            SIGNAL=str(int(signum)),
            SIGNAL_AT=at,
        )
        assert job.wait() != 0, (at, job.output)
        assert "DataLoader worker" not in job.output, job.output
    output = shell.run(f"{command} --snapshot_path s")
    shell.run(f"{command} --snapshot_path uninterrupted")
    assert_same_run(shell.folder / "uninterrupted", shell.folder / "s")
    assert assert_evaluated(output, shell.folder / "s") > 0.95


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
    page = (ROOT / "docs/recipes/images.md").read_text().splitlines()
    assert len(errors) == 2 and set(errors) <= set(page)
