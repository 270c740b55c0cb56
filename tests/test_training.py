"""Every stage trains the same model: on any number of ranks, interrupted or not, killed or not."""

import os
import pty
import subprocess
import sys
import termios

import pytest
import torch
from helpers import (
    ROOT,
    SCRIPTS,
    furthest,
    load,
    plain_loop,
    shown,
    start_stage,
    symptom,
    trained,
)
from torch import nn

import singlegpu


@pytest.fixture(scope="module")
def reference():
    return plain_loop(10, 64)


def test_interrupted_is_uninterrupted_in_every_stage(shell, monkeypatch):
    """Each stage goes on from the snapshot of the one before, bit for bit like one plain loop."""
    snapshot = shell.folder / "snapshot.pt"
    for epochs, script in enumerate(SCRIPTS[:4], 1):
        workers = epochs // 4  # the last time with a worker process for the data
        arguments = f"{epochs} 3 --batch_size 64 --num_workers {workers}"
        done = f"snapshot.pt on cpu: {epochs - 1} of {epochs} epochs done, 32 steps each"
        if script == "singlegpu.py":
            monkeypatch.chdir(shell.folder)
            monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
            singlegpu.main(0, singlegpu.parse_args())
        elif script == "multigpu.py":  # it starts its ranks itself
            (job,) = start_stage(shell, script, [1], arguments)
            assert done in job.succeeds()
        else:
            assert done in shell.ranks(f"{script} {arguments}").succeeds()
        assert load(snapshot)["epochs_run"] == epochs
        weights, momentum = trained(snapshot)
        expected_weights, expected_momentum, _ = plain_loop(epochs, 64)
        assert all(map(torch.equal, weights, expected_weights)), script
        assert all(map(torch.equal, momentum, expected_momentum)), script


def test_dropout_repeats_after_a_resume(tmp_path, monkeypatch):
    """A model with random numbers of its own, resumed, ends as if it had never stopped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(singlegpu.ToyModel, "forward", forward_with_dropout)
    for path, totals in [("resumed.pt", "12"), ("straight.pt", "2")]:
        for total in totals:
            monkeypatch.setattr(sys, "argv", ["singlegpu.py", total, "1", "--snapshot_path", path])
            singlegpu.main(0, singlegpu.parse_args())
    assert all(map(torch.equal, trained("resumed.pt")[0], trained("straight.pt")[0]))
    assert not any(map(torch.equal, trained("straight.pt")[0], plain_loop(2, 32)[0]))


def forward_with_dropout(model, inputs):
    return model.net2(nn.functional.dropout(model.relu(model.net1(inputs)), 0.5))


def test_seed_changes_the_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "1", "--seed", "1"])
    singlegpu.main(0, singlegpu.parse_args())
    result, _ = trained("snapshot.pt")
    assert all(map(torch.equal, result, plain_loop(1, 32, seed=1)[0]))
    assert not any(map(torch.equal, result, plain_loop(1, 32)[0]))


def test_killed_worker_comes_back(shell):
    job = shell.start(
        shown(
            "torchrun --standalone --nproc_per_node=2 --max-restarts=3 multigpu_torchrun.py 50 10"
            " --snapshot_path torchrun.pt",
            ("50 10 --snapshot_path torchrun.pt", "20 5"),
        )
    )
    job.wait_for("epoch 5 |")
    # The last of the job's own, as there may be others on this machine.
    found = subprocess.check_output(shown("pgrep -f multigpu_torchrun.py").split(), text=True)
    own = job.processes()
    number = [pid for pid in found.split() if int(pid) in own][-1]
    assert int(number) in job.workers().values()
    subprocess.run(shown("kill -9 NUMBER", ("NUMBER", number)).split(), check=True)
    assert job.wait() == 0, job.output
    # torchrun may have ended the other before it says so.
    caused = symptom("This is typically caused by a remote worker")
    assert caused in job.output or "closing signal SIGTERM" in job.output
    assert symptom("failed (exitcode: -9)") in job.output
    starts = [line for line in job.output.splitlines() if "epochs done" in line]
    assert len(starts) == 2, job.output
    assert int(starts[1].split()[3]) >= 5
    result, _ = trained(shell.folder / "snapshot.pt")
    assert furthest(result, plain_loop(20, 64)[0]) < 1e-6


def test_killed_while_saving_leaves_a_snapshot(shell):
    """SIGKILL at 50 random moments of a script that does nothing but save."""
    output = shell.run(f"python {ROOT}/tests/kill_while_saving.py 50")
    assert "50 kills, 50 snapshots that load" in output


def test_bar_on_a_terminal(tmp_path):
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    command = [sys.executable, ROOT / "singlegpu.py", "3", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=end, stderr=end) as process:
        os.close(end)
        shown = b""
        while chunk := read(terminal):
            shown += chunk
    os.close(terminal)
    assert process.returncode == 0
    assert b"3/3" in shown and b"epoch/s" in shown and b"loss=" in shown
    assert b"saved snapshot.pt\r\n" in shown


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux tells that the other end is closed
        return b""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "script", ["singlegpu.py", "multigpu.py", "multigpu_torchrun.py", "multinode.py"]
)
def test_gpu_trains_like_the_cpu(shell, script, reference):
    processes = torch.cuda.device_count() if script == "multigpu.py" else 1
    jobs = start_stage(shell, script, [processes], f"10 5 --batch_size {64 // processes}")
    for job in jobs:
        job.succeeds()
    result, _ = trained(shell.folder / "snapshot.pt")
    assert furthest([weight.cpu() for weight in result], reference[0]) < 1e-3
