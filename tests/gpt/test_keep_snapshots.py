"""gpt/keep_snapshots.py, and those that build on it: some snapshots stay."""

import shutil
import signal

import pytest
from gpt_helpers import BATCH_SIZE, start
from helpers import SIGNAL, equal_snapshots, long

from tools.launch.snapshots import load_gpt


@pytest.mark.parametrize("name", ["keep_snapshots.py", *long("async_save.py")])
def test_kept_snapshots(shell, name):
    """One of them, with those after it deleted, leads to the same end; a user's copy stays.

    Those after a kill are kept at the same steps; with larger batches, the old ones stay.
    """
    options = "--keep_every_steps 10 --save_every_steps"
    kill = {"SIGNAL": "9", "SIGNAL_AT": f"0 {16 * BATCH_SIZE}"}
    ends = []
    for _ in range(2):
        start(shell, name, "s", 2, options=f"{options} 5").succeeds()
        first, second, last, *copies = sorted((shell.folder / "s").iterdir())
        assert [path.name[-3:] for path in (first, second, last)] == ["120", "240", "000"]
        ends.append(load_gpt(shell.folder / "s"))
        shutil.copytree(first, shell.folder / "s" / "epoch_best", dirs_exist_ok=True)
        shutil.rmtree(second)
        shutil.rmtree(last)
        job = start(shell, name, "s", 2, SIGNAL, f"{options} 3", **kill)
        assert job.wait() == -signal.SIGKILL
    assert copies and equal_snapshots(*ends)
    cut_short = shell.folder / "s" / "epoch_0000_sample_000000000012"
    cut_short.mkdir()
    (cut_short / "kept").touch()
    larger = f"sys.argv += ['--batch_size', '{BATCH_SIZE}']"  # on each of the two ranks
    start(shell, name, "s", 2, larger, f"{options} 5", epochs=2).succeeds()
    assert first.exists() and copies[0].exists() and not cut_short.exists()


@pytest.mark.parametrize("name", ["keep_snapshots.py", *long("async_save.py")])
def test_full_disk_where_a_snapshot_is_marked(shell, name):
    setup = "def touch(path):\n    raise OSError(28, 'No space left')\nscript.Path.touch = touch\n"
    options, full = "--keep_every_steps 1", {"full_disk_folders": [shell.folder]}
    job = start(shell, name, "s", 2, setup, options, steps=2, **full)
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ")
    assert "Traceback" not in job.output
