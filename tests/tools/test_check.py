"""tools/judge/check.py passes our own files, and says what a reader has done wrong."""

import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import first, run
from rankcheck.launch.jobs import TIMEOUT_S, TimeLimit, environments

from tools.judge.check import load_task
from tools.judge.checks import explanation, judge, make_judge, toy_task
from tools.judge.run import WrongError
from tools.judge.stages import EPOCHS, STAGES
from tools.steps import ROOT
from tools.steps import STAGES as CHAIN
from tools.units import answers
from tools.units.stored import load

BY_DAY = ["singlegpu.py"]
OWN_FILES = [*dict.fromkeys([*BY_DAY, *(f"{stage}.py" for stage in STAGES)])]

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def make_task():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    data = TensorDataset(torch.randn(100, 1, 6), torch.randint(2, (100,)))
    return model, data, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), 1e-3)
"""


def check(*arguments):
    return run("python", "-m", "tools.judge.check", *arguments)


@pytest.mark.long
def test_a_model_of_ones_own(tmp_path):
    """singlegpu.py with another model, data, loss and optimizer, and with a fault."""
    for name in ("tools", "probe"):  # which modules of ours have, too
        (tmp_path / f"{name}.py").write_text("OWN = True")
    (tmp_path / "task.py").write_text(TASK)
    source = (ROOT / "singlegpu.py").read_text()
    start = source.index("    dataset = ToyDataset")
    end = source.index("    sampler = ")
    own = (
        "    import probe, task\n    assert probe.OWN\n"
        "    model, dataset, loss_fn, _ = task.make_task()\n    model.to(device)\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)\n"
    )
    source = source[:start] + own + source[end:]
    (tmp_path / "own.py").write_text(source.replace("self.totals.zero_()", "pass"))
    result = check("singlegpu", tmp_path / "own.py", "--task", tmp_path / "task.py:make_task")
    assert (result.returncode, result.stderr) == (1, ""), result.stdout + result.stderr
    first, *_, last = result.stdout.splitlines()
    assert first == f"14 checks of: python {tmp_path}/own.py 3 1 --batch_size 48"
    assert re.fullmatch(r"1 of 14 checks failed in \d+ s", last)
    assert result.stdout.count("  ok  ") == 13
    failed = result.stdout.partition("FAIL")[2].split("  ok  ")[0]
    title, why = explanation("loss")
    assert title in failed and "it logs" in failed
    assert failed.split()[-5:] == why.split()[-5:]


def test_misuse(tmp_path):
    result = check("multigpu", tmp_path / "missing.py")
    assert "there is no file" in result.stderr.splitlines()[-1]
    assert "choose from" in check("multigpus", ROOT / "multigpu.py").stderr.splitlines()[-1]


def test_repeated_samples(tmp_path):
    """Two ranks may repeat one, as DistributedSampler does to give all as many; but not two."""
    judge = make_judge(STAGES["multigpu"], ROOT / "multigpu.py", toy_task, tmp_path)
    epoch = [*judge.indices, *judge.indices][: 2048 + 1]
    run = SimpleNamespace(steps=[[0] * EPOCHS] * 2, batches=lambda: [epoch] * EPOCHS)
    judge.count_samples(run)
    epoch.append(epoch[1])
    with pytest.raises(WrongError, match="took 2050 samples"):
        judge.count_samples(run)


@pytest.mark.long
def test_each_save_is_judged_until_it_passes(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import nosuch\n")
    command = [sys.executable, "-m", "tools.judge.check", "singlegpu", file, "--watch"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        while not re.search("judged again", line := process.stdout.readline()):
            assert line and process.poll() is None
        shutil.copy(ROOT / "singlegpu.py", file)
        assert "all 14 checks passed in" in process.communicate(timeout=10 * TIMEOUT_S)[0]
    assert process.returncode == 0


HANGS = "import subprocess; print('hangs', flush=True); subprocess.run(['sleep', '1000'])"


@pytest.mark.long
def test_sigterm_leaves_no_process_behind(tmp_path, monkeypatch):
    def left_over():
        return [text for text in environments().values() if f"WITNESS_FOLDER={tmp_path}" in text]

    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "tools.judge.check", "singlegpu", tmp_path / "hangs.py"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        limit = TimeLimit()
        while len(left_over()) < 2:  # the script and its child
            assert process.poll() is None and not limit.passed(), left_over()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_S)[1] == "ended by SIGTERM\n"
    assert not left_over()


WAITS = "import time; print('it waits', flush=True); time.sleep(1e6)"


@pytest.mark.long
def test_a_run_that_hangs_is_ended_without_proc(shell, monkeypatch):
    """As on macOS, which has no /proc."""
    (shell.folder / "waits.py").write_text(WAITS)
    job = shell.start(f"torchrun --standalone --nproc_per_node=2 {shell.folder}/waits.py")
    job.wait_for("it waits", times=2)
    with monkeypatch.context() as patched:
        patched.setattr("rankcheck.launch.jobs.environments", dict)
        job.end()
    limit = TimeLimit()
    while job.processes():
        assert not limit.passed()
        time.sleep(0.01)


@pytest.mark.parametrize(
    "source, message",
    [
        ("def make_task(:", "SyntaxError"),
        ("\nimport nosuch", "fails in line 2: ModuleNotFoundError: No module named 'nosuch'"),
        ("def task(): pass", "has no attribute 'make_task'"),
        ("def make_task(): return 1, 2, 3", r"expected 4, got 3\) \(it must return a model"),
    ],
)
def test_bad_task(tmp_path, source, message):
    (tmp_path / "task.py").write_text(source)
    with pytest.raises(SystemExit, match=message):
        load_task(f"{tmp_path}/task.py:make_task")


@pytest.mark.long
@pytest.mark.parametrize("file", first(len(BY_DAY), OWN_FILES))
def test_own_files_pass(tmp_path, file, capsys):
    """All checks, whose verdict names a page; of one also the tests of its lines, in a copy."""
    stage = file.removesuffix(".py")
    assert judge(stage, ROOT / file, toy_task, tmp_path) == []
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(f"all {len(STAGES[stage].checks.split())} checks passed")
    assert ("; next: docs/" in verdict) == (file in CHAIN[:-1])
    if file == "preemptible.py":
        named = {unit["falls"] for unit in load()[file] if "::" in unit["falls"]}
        assert answers.test(file, (ROOT / file).read_text(), *named) is None
