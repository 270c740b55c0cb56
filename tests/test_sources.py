"""What shows only after a power cut, on real GPUs or in a job: read in the sources."""

import os
import re
import subprocess

import pytest

from tools.steps import ALL, ROOT

NAMES = ["singlegpu.py", *(step.file for step in ALL if step.file.endswith(".py"))]
SOURCES = {name: (ROOT / name).read_text() for name in NAMES}
SAVE = """
            with open(tmp_path, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(tmp_path, path)"""


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.save(" in SOURCES[name]])
def test_save(name):
    """A snapshot has reached the disk before it replaces the one before it."""
    assert SOURCES[name].count("torch.save(") == SOURCES[name].count(SAVE)


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.load(" in SOURCES[name]])
def test_load(name):
    """No rank loads onto the GPU of rank 0; no file runs code, whichever version torch has."""
    for arguments in re.findall(r"torch\.load\((.*)\)", SOURCES[name]):
        assert re.search(r', (map_location=)?"cpu"', arguments)
        assert ", weights_only=True" in arguments


# Runs the job file $0, and prints what srun gets: its arguments and its variables.
PRETEND_SLURM = """
source() { true; }
scontrol() { echo node1; }
srun() { printf '%s\\n' "$@"; env; }
. "$0"
"""
JOB = {
    "SLURM_EXPORT_ENV": "NONE",  # as sbatch --export=NONE sets it
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
}


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("slurm/*.sbatch")))
def test_job_file(name):
    """Slurm starts the job with all nodes; after a failure, it ends all or, elastic, none."""
    command = ["bash", "-c", PRETEND_SLURM, ROOT / "slurm" / name, "50", "10"]
    given = subprocess.run(command, env=os.environ | JOB, capture_output=True, text=True).stdout
    lines = given.splitlines()
    assert "10" in lines
    assert "SLURM_EXPORT_ENV=NONE" not in lines
    text = (ROOT / "slurm" / name).read_text()
    if "#SBATCH --nodes=1\n" not in text:
        assert "#SBATCH --wait-all-nodes=1\n" in text
        if "elastic" in name:
            assert {"--no-kill", "--wait=60"} <= set(lines)
        else:
            assert "--kill-on-bad-exit=1" in lines
