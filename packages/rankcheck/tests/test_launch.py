"""A forked rank behaves as `python script` does, and a Python at whose start GPUs are pretended."""

import os
import subprocess
import sys

import pytest

from rankcheck.launch.jobs import STARTUP, Shell

WORKERS_STAY = """
import sys
from torch.utils.data import DataLoader

options = {"persistent_workers": True, "multiprocessing_context": "fork"}
loader = DataLoader(range(8), num_workers=2, **options)
sys.batches = iter(loader)  # lives until the end
print(next(sys.batches).item())
"""


def test_data_workers_end_with_the_rank(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS_STAY)
    shell = Shell(tmp_path)
    try:
        job = shell.ranks(f"{tmp_path}/script.py")
        status = job.wait()
    finally:
        shell.end_all()
    assert (status, job.output) == (0, "0\n")


@pytest.mark.parametrize(("visible", "count"), [(None, "2"), ("1", "1"), ("", "0")])
def test_pretended_gpus_at_the_start(visible, count):
    """They are there by PRETEND_GPUS alone; CUDA_VISIBLE_DEVICES hides them as real ones."""
    ours = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    ours |= {"PRETEND_GPUS": "2", "PYTHONPATH": str(STARTUP)}
    ours |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    result = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == count, result.stderr
