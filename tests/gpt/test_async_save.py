"""gpt/async_save.py: it trains on while it saves."""

import shutil
import signal

from gpt_helpers import BATCH_SIZE, start
from helpers import SIGNAL, equal_snapshots, read_script

from tools.launch.snapshots import load_gpt


def test_trains_on_while_it_saves(shell):
    """What it saves is the state at the beginning, of which it has a copy: that of fsdp.py."""
    options = "--save_every_steps 10"
    stop = {"SIGNAL": str(int(signal.SIGTERM)), "SIGNAL_AT": f"0 {13 * BATCH_SIZE}"}
    setup = read_script("write_late.py") + SIGNAL
    job = start(shell, "async_save.py", "s", 2, setup, options, steps=30, **stop)
    job.fails("stopped by a signal")
    before = job.output.partition("writing epoch_0000_sample_000000000120")[0]
    assert "trained 20 steps" in before
    start(shell, "fsdp.py", "fsdp", 2, SIGNAL, options, steps=30, **stop).wait()
    for step in (20, 10):
        one, other = (load_gpt(shell.folder / path) for path in ("s", "fsdp"))
        assert one["samples_run"] == step * BATCH_SIZE
        assert equal_snapshots(one, other)
        for path in ("s", "fsdp"):
            shutil.rmtree(shell.folder / path / f"epoch_0000_sample_{step * BATCH_SIZE:012}")
