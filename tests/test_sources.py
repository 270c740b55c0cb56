"""What shows only after a power cut, on real GPUs or in a job: read in the sources."""

import re
import subprocess

import pytest

from tools.steps import ALL, JOB_STEPS, ROOT

NAMES = ["singlegpu.py", *(step.file for step in ALL if step.file.endswith(".py"))]
SOURCES = {name: (ROOT / name).read_text() for name in NAMES}
JOB_FILES = ["slurm/singlegpu.sbatch", *(step.file for step in JOB_STEPS)]
SYNC_AND_REPLACE = "os.fsync(file.fileno())\n            os.replace(tmp_path, path)"


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.save(" in SOURCES[name]])
def test_save(name):
    """A snapshot has reached the disk before it replaces the one before it."""
    assert SYNC_AND_REPLACE in SOURCES[name]


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.load(" in SOURCES[name]])
def test_load(name):
    """No rank loads onto the GPU of rank 0; no file runs code, whichever version torch has."""
    for arguments in re.findall(r"torch\.load\((.*)\)", SOURCES[name]):
        assert re.search(r', (map_location=)?"cpu"', arguments)
        assert ", weights_only=True" in arguments


# Runs the job file $0, submitted with --export=NONE, and prints what srun gets.
PRETEND_SLURM = """
export SLURM_EXPORT_ENV=NONE SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=2
source() { true; }
scontrol() { echo node1; }
srun() { printf '%s\\n' "$@" "export=$SLURM_EXPORT_ENV"; }
. "$0"
"""


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file(name):
    """Slurm starts the job with all nodes; after a failure, it ends all or, elastic, none."""
    command = ["bash", "-c", PRETEND_SLURM, ROOT / name, "50", "10"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert lines[-3:] == ["50", "10", "export="]
    text = (ROOT / name).read_text()
    if "#SBATCH --nodes=1\n" not in text:
        assert "#SBATCH --wait-all-nodes=1\n" in text
        if "elastic" in name:
            assert {"--no-kill", "--wait=60"} <= set(lines)
        else:
            assert "--kill-on-bad-exit=1" in lines
