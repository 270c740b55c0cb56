"""The recipe for images: its random shifts; and the traps of its page."""

import re

import pytest
import torch
from helpers import FORK, read_script, start
from rankcheck.launch.jobs import pretend_gpus
from torch import nn
from torch.utils.data import DataLoader

from tools.steps import ROOT

SCRIPT = "recipes/images.py"
PAGE = (ROOT / "docs/recipes/images.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```.*?^```text\n(.*?)^```", PAGE, re.S | re.M)


def test_shifts_depend_on_sample_and_epoch():
    """All nine shifts are equally frequent; in the same epoch, a sample always has the same one.

    Also if a data worker stays from epoch to epoch.
    """
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
    options = {"persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(samples, 900, num_workers=1, **options)
    for epoch in (1, 2):
        samples.epoch.fill_(epoch)
        assert next(iter(loader))[0][:, 0, 3, 3].tolist() == drawn(epoch)


@pytest.mark.nightly
def test_batch_norm_is_synchronized(shell):
    convert = 'lambda model: print("converted") or model'  # pretended GPUs have no kernel for it
    setup = f"script.nn.SyncBatchNorm.convert_sync_batchnorm = {convert}"
    assert start(shell, SCRIPT, "1", setup, **pretend_gpus(2)).succeeds().count("converted") == 2


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 2)])
def test_scripts_of_the_page(shell, number, ranks):
    """They print what it shows."""
    source, shown = SNIPPETS[number]
    (shell.folder / "trap.py").write_text(FORK + source)
    output = shell.ranks(f"{shell.folder}/trap.py", ranks).succeeds()
    assert sorted(output.splitlines()) == sorted(shown.splitlines())


ALONE = read_script("evaluate_alone.py")


@pytest.mark.long
def test_rank_0_evaluates_alone(shell):
    """With DDP, it hangs; with the model that DDP wraps, it does not."""
    (shell.folder / "ddp.py").write_text(ALONE)
    job = shell.ranks(f"{shell.folder}/ddp.py", 2, LIMIT="1")
    assert job.wait() != 0 and "timed out" in job.output, job.output
    (shell.folder / "wrapped.py").write_text(ALONE.replace("model(torch", "model.module(torch"))
    shell.ranks(f"{shell.folder}/wrapped.py", 2, LIMIT="1000").succeeds()


def test_what_torch_refuses():
    """SyncBatchNorm on a CPU, and a batch of one sample."""
    for norm in (nn.SyncBatchNorm(32), nn.BatchNorm1d(32)):
        with pytest.raises(ValueError) as error:
            norm(torch.randn(1, 32))
        assert f"`{error.value}`" in PAGE
