"""The recipe for images: it resumes bit for bit; and the traps of its page."""

import re
import signal

import pytest
import torch
from helpers import equal_snapshots, patched
from torch import nn

from recipes.images import RandomShift
from tools.launch.snapshots import load
from tools.steps import ROOT

SCRIPT = "recipes/images.py"
PAGE = (ROOT / "docs/recipes/images.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```.*?^```text\n(.*?)^```", PAGE, re.S | re.M)
# Data workers are forked, as they are under torchrun; a rank of `jobs.Ranks` would spawn them.
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


def test_killed_is_uninterrupted(shell):
    """Also with another number of data workers; and it has learned the digits."""
    script = write(shell, "patched.py", patched(SCRIPT, FORK + KILL))
    command = f"{script} 3 1 --snapshot_path"
    uninterrupted = shell.ranks(f"{command} uninterrupted", 2)
    killed = shell.ranks(f"{command} s --num_workers 2", 2, KILL_AT="40")  # in epoch 1 of 0 to 2
    assert killed.wait() in (-signal.SIGKILL, -signal.SIGTERM)  # this, once another is gone
    output = shell.ranks(f"{command} s", 2).succeeds()
    assert "1 of 3 epochs done" in output
    uninterrupted.succeeds()
    assert equal_snapshots(load(shell.folder / "uninterrupted"), load(shell.folder / "s"))
    assert float(re.findall(r"accuracy (\S+)% of 359 samples", output)[-1]) > 80


def test_shifts_depend_on_sample_and_epoch():
    """All nine shifts are equally frequent; in the same epoch, a sample always has the same one."""
    image = torch.arange(1.0, 65).view(1, 8, 8)
    samples = RandomShift([(image, 0)] * 900, seed=3)

    def drawn(epoch):
        samples.epoch.fill_(epoch)
        return [int(samples[index][0][0, 3, 3]) for index in range(900)]

    shifts = drawn(1)
    expected = {int(image[0, 3 + y, 3 + x]) for y in (-1, 0, 1) for x in (-1, 0, 1)}
    assert set(shifts) == expected
    assert all(60 < shifts.count(shift) < 140 for shift in expected)
    assert 60 < sum(map(int.__eq__, shifts, drawn(2))) < 140
    assert drawn(1) == shifts


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 2)])
def test_scripts_of_the_page(shell, number, ranks):
    """They print what it shows."""
    source, shown = SNIPPETS[number]
    output = shell.ranks(str(write(shell, "trap.py", FORK + source)), ranks).succeeds()
    assert sorted(output.splitlines()) == sorted(shown.splitlines())


@pytest.mark.parametrize("module", ["", ".module"])
def test_rank_0_evaluates_alone(shell, module):
    """With DDP, it hangs; with the model that DDP wraps, it does not."""
    script = f"""
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", timeout=timedelta(seconds=1))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)))
model.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        model{module}(torch.randn(8, 4))
dist.barrier()
time.sleep(0.1)
dist.destroy_process_group()
"""
    job = shell.ranks(str(write(shell, "alone.py", script)), 2)
    if module:
        job.succeeds()
    else:
        assert job.wait() != 0
        assert re.search("Timed out waiting|Application timeout", job.output), job.output


def test_what_torch_refuses():
    """SyncBatchNorm on a CPU, and a batch of one sample."""
    for norm in (nn.SyncBatchNorm(32), nn.BatchNorm1d(32)):
        with pytest.raises(ValueError) as error:
            norm(torch.randn(1, 32))
        assert f"`{error.value}`" in PAGE
