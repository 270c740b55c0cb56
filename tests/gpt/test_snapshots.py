"""Snapshots of gpt/dcp.py and those that build on it: killed, full disks, other layouts, kept."""

import re
import shutil
import signal

import pytest
from gpt_helpers import BATCH_SIZE, SIGNAL_AT_FOURTH, signal_after, start
from helpers import CLOCK, SIGNAL, at_step, equal_snapshots, long, read_script

from tools.launch.snapshots import load_gpt

KEEPING = ["keep_snapshots.py", *long("async_save.py")]
NO_TOUCH = "def touch(path):\n    raise OSError(28, 'No space left')\nscript.Path.touch = touch\n"


def start_on_full_disk(shell, name, setup="", options=""):
    full = {"full_disk_folders": [shell.folder]}
    return start(shell, name, "s", 2, setup, options, steps=2, **full)


@pytest.mark.parametrize("name", ["async_save.py", *long("fsdp.py")])
def test_full_disk(shell, name):
    error = "used by another run? CheckpointException('write', {0: (RuntimeError("
    job = start_on_full_disk(shell, name)
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ", error)
    assert "Traceback" not in job.output


@pytest.mark.parametrize("name", KEEPING)
def test_full_disk_where_a_snapshot_is_marked(shell, name):
    job = start_on_full_disk(shell, name, NO_TOUCH, "--keep_every_steps 1")
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ")
    assert "Traceback" not in job.output


def test_killed_while_dcp_saves(shell):
    """The snapshot before stays, and none but it; if it is damaged, one line says so."""
    kill = at_step(15, "script.dcp.save = lambda *state, **options: os.kill(os.getpid(), 9)")
    options = "--save_every_steps 5 --log_every_steps 5"
    job = start(shell, "dcp.py", "s", 1, CLOCK + kill, options, steps=16)
    assert job.wait() == -signal.SIGKILL
    (folder,) = (shell.folder / "s").iterdir()
    assert folder.name == "epoch_0000_sample_000000000120"
    # The time is that of five steps alone.
    speeds = [5 * BATCH_SIZE * 8 / seconds for seconds in (0.015, 0.040, 0.065)]
    assert re.findall(r"(\S+) tokens/s", job.output) == [f"{speed:,.0f}" for speed in speeds]
    (folder / "__0_0.distcp").write_bytes(b"cut short")
    start(shell, "dcp.py", "s").fails(f"cannot load s/{folder.name}: move it or set another")


@pytest.mark.parametrize("name", ["dcp.py", *long("fsdp.py")])
def test_snapshots_need_a_shared_disk(shell, name):
    """Each rank writes its own shards, but only the folder of rank 0 has .metadata."""
    start(shell, name, "s", "ab", steps=2).succeeds()
    start(shell, name, "s", "ab", steps=2).fails(
        "ranks start at [('epoch_0001_sample_000000000000', 'seed 0, ", "), (None, 'seed 0, "
    )


def test_snapshot_of_another_layout(shell):
    start(shell, "fsdp.py", "sharded", steps=2).succeeds()
    error = ": move it or set another --snapshot_path"
    start(shell, "pretrain.py", "sharded", steps=2).fails(f"cannot load sharded{error}")
    path = "sharded/epoch_0001_sample_000000000000"
    start(shell, "local_sgd.py", "sharded", 2, steps=2).fails(f"cannot load {path}{error}")
    (shell.folder / "file").write_text("hello")
    for snapshot in ("file", path):
        error = f"--snapshot_path {snapshot} is not a folder of snapshots: name one"
        start(shell, "dcp.py", snapshot, 2, steps=2).fails(error)


@pytest.mark.long
@pytest.mark.parametrize("name", KEEPING)
def test_kept_snapshots(shell, name):
    """One of them, with those after it deleted, leads to the same end; a user's copy stays.

    Those after a kill are kept at the same steps; with larger batches, the old ones stay.
    """
    options = "--keep_every_steps 4 --save_every_steps"
    ends = []
    for _ in range(2):
        start(shell, name, "s", 2, options=f"{options} 2").succeeds()
        first, second, last, *copies = sorted((shell.folder / "s").iterdir())
        assert [path.name[-3:] for path in (first, second, last)] == ["048", "096", "000"]
        ends.append(load_gpt(shell.folder / "s"))
        shutil.copytree(first, shell.folder / "s" / "epoch_best", dirs_exist_ok=True)
        shutil.rmtree(second)
        shutil.rmtree(last)
        if not copies:
            kill = signal_after(7, signal.SIGKILL)
            job = start(shell, name, "s", 2, SIGNAL, f"{options} 3", **kill)
            assert job.wait() == -signal.SIGKILL
    assert copies and equal_snapshots(*ends)
    cut_short = shell.folder / "s" / "epoch_0000_sample_000000000012"
    cut_short.mkdir()
    (cut_short / "kept").touch()
    larger = f"sys.argv += ['--batch_size', '{BATCH_SIZE}']"  # on each of the two ranks
    start(shell, name, "s", 2, larger, f"{options} 2", epochs=2).succeeds()
    assert first.exists() and copies[0].exists() and not cut_short.exists()
    # Another script keeps them as well; of the two after an epoch's last step, one is marked.
    start(shell, "fsdp.py", "s", 2, epochs=3).succeeds()
    names = sorted(path.parent.name for path in (shell.folder / "s").glob("epoch_0*/kept"))
    positions = ["0000_sample_000000000048", "0000_sample_000000000096", "0001_sample_000000000096"]
    assert names == [f"epoch_{position}" for position in positions]


@pytest.mark.long
def test_async_save_trains_on(shell):
    """What it saves is the state at the beginning, of which it has a copy: that of fsdp.py."""
    options = "--save_every_steps 4"
    late = read_script("write_late.py")
    for name, setup in [("fsdp", ""), ("async_save", late)]:
        setup += SIGNAL_AT_FOURTH
        job = start(shell, f"{name}.py", name, 2, setup, options, **signal_after(5))
        job.fails("stopped by a signal")
    before = job.output.partition("writing epoch_0000_sample_000000000048")[0]
    assert "trained 8 steps" in before
    folders = [shell.folder / "fsdp", shell.folder / "async_save"]
    for step in (8, 4):
        one, other = map(load_gpt, folders)
        assert one["samples_run"] == step * BATCH_SIZE
        assert equal_snapshots(one, other)
        for folder in folders:
            shutil.rmtree(folder / f"epoch_0000_sample_{step * BATCH_SIZE:012}")
