"""Every stage trains the same model: on any number of ranks, interrupted or not, killed or not."""

import os
import re
import signal
import sys

import pexpect
import pytest
import torch
from helpers import (
    LONG,
    SCRIPTS,
    assert_trained,
    documented_error,
    fences,
    first,
    patch,
    reference_run,
)

from tools.launch.snapshots import max_abs_diff
from tools.steps import ROOT

# For `patch`: after five epochs, all wait, until one of them is killed and torchrun restarts them.
WAIT_TO_BE_KILLED = """
@before(script.Trainer, "_run_batch")
def wait(self, inputs, targets):
    if self.epochs_run == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(10**6)
"""


@pytest.mark.long
def test_killed_worker_is_restarted(shell):
    script = patch(shell.folder, "multigpu_torchrun.py", WAIT_TO_BE_KILLED)
    job = shell.start(
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
        f"torchrun --standalone --nproc_per_node=2 --max-restarts=3 {script} 20 5"
    )
    job.wait_for("epoch 5 |")
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait() == 0, job.output
    # torchrun may have ended the other before it says so.
    consequence = documented_error("This is typically caused by a remote worker")
    assert consequence in job.output or "closing signal SIGTERM" in job.output
    # In torchrun's clock, which counts seconds, the other one may be the first that failed.
    killed = re.escape(documented_error("failed (exitcode: -9)"))
    assert re.search(killed.replace(r"\-9", "(-9|-15|1)"), job.output), job.output
    starts = [line for line in job.output.splitlines() if "epochs done" in line]
    assert len(starts) == 2, job.output
    assert starts[1].startswith("5 of 20 ")
    assert_trained(shell.folder / "snapshot.pt", 20, 64)


# For `patch`: the process is killed in the middle of saving its second epoch.
KILLED_WHILE_SAVING = """
whole_save = torch.save
def save(snapshot, file):
    whole_save(snapshot, file)
    if snapshot["epochs_run"] == 2:
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), 9)
torch.save = save
"""


@pytest.mark.parametrize("name", first(2, SCRIPTS, LONG))
def test_killed_while_saving_leaves_a_snapshot(shell, name):
    (shell.folder / "whole").mkdir()
    killed = patch(shell.folder, name, KILLED_WHILE_SAVING)
    assert shell.ranks(f"{killed} 3 1").wait() == -signal.SIGKILL
    whole = patch(shell.folder / "whole", name)
    assert "1 of 3 epochs done" in shell.ranks(f"{whole} 3 1").succeeds()


def test_elastic_counts_steps(shell):
    """An epoch has as many steps as global batches."""
    output = shell.ranks("elastic_ddp.py 1", 2).succeeds()
    assert "0 of 1 epochs done, 32 steps per epoch, on " in output


def test_newest_snapshot_that_breaks_on_its_way(shell):
    nodes = [shell.folder / "a", shell.folder / "b"]
    shell.ranks_on(nodes[:1], "recipes/own_disks.py 1").succeeds()
    setup = "script.Path.read_bytes = lambda path: b'half'"
    script = patch(shell.folder, "recipes/own_disks.py", setup)
    shell.ranks_on(nodes, f"{script} 2").fails(
        "cannot load <_io.BytesIO", ": move it or set another"
    )


@pytest.mark.long
def test_bar_on_a_terminal(tmp_path):
    command = f"{sys.executable} {ROOT}/singlegpu.py 3 2"
    output, status = pexpect.run(command, cwd=tmp_path, dimensions=(24, 100), withexitstatus=True)
    assert status == 0
    assert b"3/3" in output and b"epoch/s" in output and b"loss=" in output
    assert b"saved snapshot.pt\r\n" in output


def test_trained_model_is_used(shell, monkeypatch, capsys):
    """Without DDP, by the lines of docs/your_project.md."""
    output = shell.ranks("multinode.py 2 2 --batch_size 32", 4).succeeds()
    assert re.search(
        documented_error("rank 0 of 4 on laptop starts: torch").replace("laptop", r"\S+"), output
    )
    assert documented_error("16 steps per epoch") in output
    *_, lines, prefixed = fences("your_project.md", "python")
    monkeypatch.chdir(shell.folder)
    names = {}
    exec(lines, names)
    assert not names["model"].training
    assert max_abs_diff(names["model"].parameters(), reference_run(2, 128)[0]) < 1e-6
    printed = re.fullmatch(r"tensor\(\[\[(.*)\]\]\)\n", capsys.readouterr().out)[1]
    expected = names["model"](torch.ones(1, 10))[0].tolist()
    assert [float(number) for number in printed.split(",")] == pytest.approx(expected, abs=1e-4)

    weights = names["snapshot"]["model"]
    names["snapshot"]["model"] = {f"module.{name}": weights[name] for name in weights}
    exec(prefixed, names)
    assert list(names["snapshot"]["model"]) == list(weights)
