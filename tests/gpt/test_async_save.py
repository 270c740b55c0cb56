"""gpt/async_save.py: it trains on while it saves, and keeps some snapshots."""

import shutil
import signal

import pytest
from gpt_helpers import BATCH_SIZE, start
from helpers import SIGNAL, equal_snapshots, read_script

from tools.launch.snapshots import load_gpt


@pytest.mark.long
def test_kept_snapshots(shell):
    """One of them, with those after it deleted, leads to the same end; a user's copy stays.

    Those after a kill are kept at the same steps; with larger batches, the old ones stay.
    """
    options = "--keep_every_steps 10 --save_every_steps"
    kill = {"SIGNAL": "9", "SIGNAL_AT": f"0 {16 * BATCH_SIZE}"}
    ends = []
    for _ in range(2):
        start(shell, "async_save.py", "s", 2, options=f"{options} 5").succeeds()
        first, second, last, *copies = sorted((shell.folder / "s").iterdir())
        assert [path.name[-3:] for path in (first, second, last)] == ["120", "240", "000"]
        ends.append(load_gpt(shell.folder / "s"))
        shutil.copytree(first, shell.folder / "s" / "epoch_best", dirs_exist_ok=True)
        shutil.rmtree(second)
        shutil.rmtree(last)
        job = start(shell, "async_save.py", "s", 2, SIGNAL, f"{options} 3", **kill)
        assert job.wait() == -signal.SIGKILL
    assert copies and equal_snapshots(*ends)
    larger = f"sys.argv += ['--batch_size', '{BATCH_SIZE}']"  # on each of the two ranks
    start(shell, "async_save.py", "s", 2, larger, f"{options} 5", epochs=2).succeeds()
    assert first.exists() and copies[0].exists()


def test_trains_on_while_it_saves(shell):
    """What it saves is the state at the beginning, of which it has a copy: that of fsdp.py."""
    options = "--save_every_steps 10"
    stop = {"SIGNAL": str(int(signal.SIGTERM)), "SIGNAL_AT": f"0 {13 * BATCH_SIZE}"}
    setup = read_script("write_late.py") + SIGNAL
    job = start(shell, "async_save.py", "s", 2, setup, options, steps=30, **stop)
    job.fails("stopped by a signal")
    before = job.output.partition("writing epoch_0000_sample_000000000120")[0]
    assert f"trained {20 * BATCH_SIZE}" in before
    start(shell, "fsdp.py", "fsdp", 2, SIGNAL, options, steps=30, **stop).wait()
    for step in (20, 10):
        one, other = (load_gpt(shell.folder / path) for path in ("s", "fsdp"))
        assert one["samples_run"] == step * BATCH_SIZE
        assert equal_snapshots(one, other)
        for path in ("s", "fsdp"):
            shutil.rmtree(shell.folder / path / f"epoch_0000_sample_{step * BATCH_SIZE:012}")


@pytest.mark.long
def test_full_disk_where_a_snapshot_is_marked(shell):
    setup = "def touch(path):\n    raise OSError(28, 'No space left')\nscript.Path.touch = touch\n"
    options, full = "--keep_every_steps 1", {"full_disk_folders": [shell.folder]}
    job = start(shell, "async_save.py", "s", 2, setup, options, steps=2, **full)
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ")
    assert "Traceback" not in job.output
