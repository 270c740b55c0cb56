"""What beginners do: each mistake gets one clear line, a non-zero exit, and nothing is lost."""

import importlib
import os
import resource
import socket
import stat
import subprocess
import sys

import pytest
import steps
import torch
from helpers import (
    ROOT,
    SCRIPTS,
    load,
    start_stage,
    symptom,
)

import singlegpu

RECIPES = [step.file for step in steps.RECIPES]


def module(script):
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize("script", SCRIPTS + RECIPES)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("0", "argument total_epochs: must be 1 or more, not 0"),
        ("50 0", "argument save_every: must be 1 or more, not 0"),
        ("-3", "argument total_epochs: must be 1 or more, not -3"),
        ("fifty", "argument total_epochs: invalid whole_number value: 'fifty'"),
        ("5 5 --batch_size 0", "argument --batch_size: must be 1 or more, not 0"),
        ("5 5 --num_workers -1", "argument --num_workers: must be 0 or more, not -1"),
        ("5 5 --seed x", "argument --seed: invalid whole_number value: 'x'"),
        ("5 5 5", "unrecognized arguments: 5"),
        ("--snapshot_path no/such/s.pt", "no/such: create it, or set --snapshot_path"),
    ],
)
def test_arguments(script, arguments, problem, monkeypatch):
    """Within this process, since importing torch 36 times over would take minutes."""
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    if script not in ("singlegpu.py", "multigpu.py"):
        monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as exit:
        module(script).parse_args()
    assert exit.value.code.startswith(f"{os.path.basename(script)}: ")
    assert exit.value.code.endswith(problem)


@pytest.mark.parametrize("script", SCRIPTS[2:] + RECIPES)
def test_without_torchrun(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as exit:
        module(script).parse_args()
    name = os.path.basename(script)
    assert exit.value.code.startswith(f"{name}: start it with: torchrun --")
    assert f" {script} " in exit.value.code


def test_torchrun_on_a_stage_without(shell):
    job = shell.start("torchrun --standalone --nproc_per_node=2 multigpu.py")
    job.fails("multigpu.py", "start it with: python multigpu.py 50 10")


def test_more_processes_than_gpus(shell):
    job = shell.start(
        "torchrun --standalone --nproc_per_node=2 multigpu_torchrun.py",
        PYTHONPATH=str(ROOT / "tests" / "fake_gpus"),
        FAKE_GPUS="1",
        FAKE_CUDA="1",
    )
    problem = symptom("has 1 GPUs for 2 processes: lower --nproc_per_node")
    job.fails("multigpu_torchrun.py", f"{socket.gethostname()} {problem}")


def broken_snapshots():
    other = {"model": {"net1.weight": torch.zeros(3, 3)}, "optimizer": {}, "epochs_run": 1}
    return {"other model": other, "list": [1, 2], "no keys": {}}


@pytest.mark.parametrize("kind", [*broken_snapshots(), "half", "text", "empty", "folder"])
def test_what_is_no_snapshot(kind, tmp_path, monkeypatch):
    path = tmp_path / "snapshot.pt"
    if kind in broken_snapshots():
        torch.save(broken_snapshots()[kind], path)
    elif kind == "half":
        torch.save({"model": {}, "optimizer": {}, "epochs_run": 3}, path)
        path.write_bytes(path.read_bytes()[:700])
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("hello" if kind == "text" else "")
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "5", "5", "--snapshot_path", str(path)])
    with pytest.raises(SystemExit) as exit:
        singlegpu.main(0, singlegpu.parse_args())
    problem = symptom("is no snapshot of this model; move it or set --snapshot_path")
    assert exit.value.code.startswith(f"singlegpu.py: {path} {problem}")
    assert path.stat().st_mtime_ns == before


def test_full_disk(shell, script="singlegpu.py"):
    """A limit on the size of files stands in for the full disk: a write fails in its middle."""
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1}
    torch.save(snapshot, shell.folder / "snapshot.pt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        (job,) = start_stage(shell, script, [1], "3 1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    job.fails(script, "cannot save snapshot.pt ([Errno 27] File too large): make room, or set")
    assert load(shell.folder / "snapshot.pt")["epochs_run"] == 1


def test_full_disk_and_a_large_model(shell):
    """torch then raises another error, since it fails to end the file that it has begun."""
    code = (
        "import resource, sys, torch; sys.path.insert(0, sys.argv.pop()); import singlegpu\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "singlegpu.ToyModel = lambda: torch.nn.Sequential(torch.nn.Linear(10, 10**5), "
        "torch.nn.Linear(10**5, 5))\n"
        "singlegpu.ToyDataset = lambda size: torch.utils.data.TensorDataset("
        "torch.zeros(1, 10), torch.zeros(1, 5))\n"
        "singlegpu.main(0, singlegpu.parse_args())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "1", "1", ROOT],
        cwd=shell.folder,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "cannot save snapshot.pt ([Errno 27] File too large): make room" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


def test_folder_of_somebody_else(tmp_path):
    """As root, who may write anywhere, this turns into an ordinary user first."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv.pop()); import singlegpu\n"
        "os.getuid() or os.setuid(65534)\n"
        "singlegpu.parse_args()"
    )
    command = [sys.executable, "-c", code, "--snapshot_path", tmp_path / "s.pt", ROOT]
    result = subprocess.run(command, capture_output=True, text=True)
    tmp_path.chmod(stat.S_IRWXU)
    assert result.returncode == 1
    assert result.stderr == (
        f"singlegpu.py: cannot write into {tmp_path}: create it, or set --snapshot_path\n"
    )


def test_port_taken(shell):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        job = shell.start("python multigpu.py 2 1", MASTER_PORT=str(port))
        problem = symptom(
            "port 12355 is taken or silent: try another MASTER_PORT", ("12355", str(port))
        )
        job.fails("multigpu.py", problem)


def test_node_that_missed_the_snapshot(shell, monkeypatch):
    """Two machines without a shared disk: only one of them has the snapshot of the first run."""
    (shell.folder / "a").mkdir()
    snapshot = shell.folder / "a" / "snapshot.pt"
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "10", "--snapshot_path", str(snapshot)])
    singlegpu.main(0, singlegpu.parse_args())
    problem = symptom("starts at epoch 0, not 10: share the disk or copy the file")
    problem = f"{socket.gethostname()} {problem}"
    job = shell.ranks_on([shell.folder / "a", shell.folder / "b"], "multinode.py 20 5")
    assert job.wait() == 1
    assert job.output.count(f"multinode.py: {problem}\n") == 2  # each machine's first process
    assert "Traceback" not in job.output
    assert load(snapshot)["epochs_run"] == 10


def test_finished_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "1"])
    singlegpu.main(0, singlegpu.parse_args())
    before = (tmp_path / "snapshot.pt").stat().st_mtime_ns
    capsys.readouterr()
    singlegpu.main(0, singlegpu.parse_args())
    said = capsys.readouterr().out
    end = symptom("50 of 50 epochs done, ask for more to go on", ("50 of 50", "1 of 1"))
    assert said == f"snapshot.pt on cpu: {end}\n"
    assert (tmp_path / "snapshot.pt").stat().st_mtime_ns == before
