"""The recipe for images: it resumes bit for bit; and the traps of its page."""

import re
import signal

import pytest
import torch
from helpers import FORK, KILL, equal_snapshots, patch
from torch import nn

from tools.launch.jobs import pretend_gpus
from tools.launch.snapshots import load
from tools.steps import ROOT

SCRIPT = "recipes/images.py"
PAGE = (ROOT / "docs/recipes/images.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```.*?^```text\n(.*?)^```", PAGE, re.S | re.M)


def write(shell, name, source):
    path = shell.folder / name
    path.write_text(source)
    return path


# Where the first image is brightest, in each epoch.
PRINT_SHIFT = """
@after(script.Trainer, "_run_epoch")
def print_shift(self, epoch):
    print("brightest at", self.train_loader.dataset[0][0].argmax().item())
"""


@pytest.mark.long
def test_killed_is_uninterrupted(shell):
    """Also with another number of data workers; and it has learned digits at several places."""
    script = patch(shell.folder, SCRIPT, FORK + KILL + PRINT_SHIFT)
    command = f"{script} 3 1 --snapshot_path"
    uninterrupted = shell.ranks(f"{command} uninterrupted", 2)
    killed = shell.ranks(f"{command} s --num_workers 2", 2, KILL_AT="40")  # in epoch 1 of 0 to 2
    assert killed.wait() in (-signal.SIGKILL, -signal.SIGTERM)  # this, once another is gone
    output = shell.ranks(f"{command} s", 2).succeeds()
    assert "1 of 3 epochs done" in output
    shifts = re.findall(r"brightest at \d+", uninterrupted.succeeds())
    assert len(shifts) == 6 and len({*shifts}) > 1
    assert equal_snapshots(load(shell.folder / "uninterrupted"), load(shell.folder / "s"))
    assert float(re.findall(r"accuracy (\S+)% of 359 samples", output)[-1]) > 80


def test_shifts_depend_on_sample_and_epoch():
    """All nine shifts are equally frequent; in the same epoch, a sample always has the same one."""
    from recipes.images import RandomShift  # which the other tests do not need

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


@pytest.mark.long
@pytest.mark.nightly
def test_batch_norm_is_synchronized(shell):
    convert = 'lambda model: print("converted") or model'  # pretended GPUs have no kernel for it
    setup = f"script.nn.SyncBatchNorm.convert_sync_batchnorm = {convert}"
    ranks = shell.ranks(f"{patch(shell.folder, SCRIPT, setup)} 1", 2, **pretend_gpus(2))
    assert ranks.succeeds().count("converted") == 2


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 2)])
def test_scripts_of_the_page(shell, number, ranks):
    """They print what it shows."""
    source, shown = SNIPPETS[number]
    output = shell.ranks(str(write(shell, "trap.py", FORK + source)), ranks).succeeds()
    assert sorted(output.splitlines()) == sorted(shown.splitlines())


@pytest.mark.parametrize(("module", "limit_s"), [("", 1), (".module", 1000)])
def test_rank_0_evaluates_alone(shell, module, limit_s):
    """With DDP, it hangs; with the model that DDP wraps, it does not."""
    script = f"""
import time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1)))
model.eval()
if dist.get_rank() == 0:
    with torch.no_grad():
        model{module}(torch.randn(8, 4))
dist.barrier(async_op=True).wait(timedelta(seconds={limit_s}))
time.sleep(0.1)
dist.destroy_process_group()
"""
    job = shell.ranks(str(write(shell, "alone.py", script)), 2)
    if module:
        job.succeeds()
    else:
        assert job.wait() != 0
        assert "timed out" in job.output, job.output


def test_what_torch_refuses():
    """SyncBatchNorm on a CPU, and a batch of one sample."""
    for norm in (nn.SyncBatchNorm(32), nn.BatchNorm1d(32)):
        with pytest.raises(ValueError) as error:
            norm(torch.randn(1, 32))
        assert f"`{error.value}`" in PAGE
