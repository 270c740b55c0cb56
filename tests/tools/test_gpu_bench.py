"""bench/gpu.py, on the CPU: all but the GPU itself."""

import re

import pytest
import torch

from bench import gpu


@pytest.mark.nightly
def test_stages(tmp_path, monkeypatch):
    """On three ranks, whose sampler takes a sample twice; another seed is told, and a failure."""
    stage_command = gpu.stage_command

    def with_faults(stage, gpus):
        if stage == "multigpu.py":
            return "python nosuch.py"
        return stage_command(stage, gpus) + " --seed 1" * (stage == "resumable.py")

    monkeypatch.setattr(gpu, "stage_command", with_faults)
    monkeypatch.setattr(gpu, "MANY_EPOCHS", 5)
    results = {row.split("`")[1]: row for row in [*gpu.stage_rows(3, tmp_path)][2:]}
    assert list(results) == gpu.STAGES
    assert "| failed: " in results.pop("multigpu.py")
    assert re.search(r"\| \d\.\d+, not \d", results.pop("resumable.py"))
    assert all(", equal |" in row for row in results.values())


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no NVIDIA GPU is visible: nvidia-smi"):
        gpu.main()
