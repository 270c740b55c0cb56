"""Snapshots of gpt/dcp.py and those that build on it: full disks, damage, other layouts."""

import re
import signal

import pytest
from gpt_helpers import BATCH_SIZE, start
from helpers import CLOCK, at_step, long


@pytest.mark.parametrize("name", ["async_save.py", *long("fsdp.py")])
def test_full_disk(shell, name):
    job = start(shell, name, "s", 2, steps=2, full_disk_folders=[shell.folder])
    error = "used by another run? CheckpointException('write', {0: (RuntimeError("
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ", error)
    assert "Traceback" not in job.output


def test_killed_while_it_saves(shell):
    """The snapshot before stays, and none but it; if it is damaged, one line says so."""
    kill = at_step(15, "script.dcp.save = lambda *state, **options: os.kill(os.getpid(), 9)")
    options = "--save_every_steps 5 --log_every_steps 5"
    job = start(shell, "dcp.py", "s", 1, CLOCK + kill, options)
    assert job.wait() == -signal.SIGKILL
    (folder,) = (shell.folder / "s").iterdir()
    assert folder.name == "epoch_0000_sample_000000000120"
    # The time is that of five steps alone.
    speeds = [5 * BATCH_SIZE * 8 / seconds for seconds in (0.015, 0.040, 0.065)]
    assert re.findall(r"(\S+) tokens/s", job.output) == [f"{speed:,.0f}" for speed in speeds]
    (folder / "__0_0.distcp").write_bytes(b"cut short")
    start(shell, "dcp.py", "s").fails(f"cannot load s/{folder.name}: move it or set another")


@pytest.mark.parametrize("name", ["dcp.py", "fsdp.py"])
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
    job = start(shell, "local_sgd.py", "sharded", 2, steps=2)
    job.fails(f"cannot load {path}{error}")
    (shell.folder / "file").write_text("hello")
    start(shell, "dcp.py", "file", 2, steps=2).fails(
        "--snapshot_path file is a file: name a folder"
    )
