"""tools/judge/check.py passes our own files, and fails each faulty one for its fault alone."""

import subprocess
import sys

import helpers
import pytest
from helpers import ROOT

from tools.judge.check import STAGES, explanation, judge, toy_task
from tools.judge.faults import FAULTS

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


@pytest.fixture(autouse=True)
def set_back(monkeypatch):
    """What `judge` sets for its process, where other tests run after it, is set back."""
    monkeypatch.setattr(helpers, "TIMEOUT_S", helpers.TIMEOUT_S)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def check(*arguments):
    command = [sys.executable, "-m", "tools.judge.check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_model_of_ones_own(tmp_path):
    """singlegpu.py with another model, data, loss and optimizer, and with a fault."""
    (tmp_path / "task.py").write_text(TASK)
    source = (ROOT / "singlegpu.py").read_text()
    start = source.index("    dataset = ToyDataset")
    end = source.index("    sampler = ")
    own = "    import task\n    model, dataset, loss_fn, optimizer = task.make_task()\n"
    source = source[:start] + own + source[end:]
    (tmp_path / "own.py").write_text(source.replace("self.total_loss.zero_()", "pass"))
    result = check("singlegpu", tmp_path / "own.py", "--task", tmp_path / "task.py:make_task")
    assert result.stderr == "1 of 11 checks failed\n", result.stdout + result.stderr
    assert result.stdout.count("  ok  ") == 10
    failed = result.stdout.partition("FAIL")[2].split("  ok  ")[0]
    title, why = explanation("loss")
    assert title in failed and "it logs" in failed
    assert failed.split()[-5:] == why.split()[-5:]


def test_misuse(tmp_path):
    result = check("multigpu", tmp_path / "missing.py")
    assert "there is no file" in result.stderr.splitlines()[-1]
    assert "choose from" in check("multigpus", ROOT / "multigpu.py").stderr.splitlines()[-1]


def after(number, params):
    """Leaves all but the first ones to the night."""
    late = [pytest.param(param, marks=helpers.NIGHTLY) for param in params[number:]]
    return [*params[:number], *late]


@pytest.mark.long
@pytest.mark.parametrize("stage", after(6, list(STAGES)))
def test_own_files_pass(tmp_path, stage):
    assert judge(stage, ROOT / f"{stage}.py", toy_task, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("fault", after(10, FAULTS), ids=lambda fault: fault.what)  # the page's
def test_a_fault_fails_its_checks_alone(tmp_path, fault):
    file = tmp_path / "faulty.py"
    file.write_text(fault.source())
    assert judge(fault.stage, file, toy_task, tmp_path) == fault.fails.split()
