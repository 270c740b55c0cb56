"""Each job file, read and run beside a stub of srun; test_slurm.py runs them on a real Slurm."""

import re
import shutil

import pytest
from helpers import run, snippet

from tools import steps
from tools.launch.jobs import environment
from tools.steps import ROOT

JOB_FILES = ["slurm/singlegpu.sbatch", *(step.file for step in steps.JOB_STEPS)]
# Runs the job file $0, submitted with --export=NONE, and prints what srun gets.
PRETEND_SLURM = """
export SLURM_EXPORT_ENV=NONE SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=2
export SLURM_CPUS_PER_TASK=1 SLURM_GPUS_PER_TASK=1
source() { [[ $1 == .venv/* ]] || . "$1"; }
module() { echo "module $*"; }
scontrol() { echo node1; }
srun() {
  printf '%s\\n' "network $NCCL_SOCKET_IFNAME" :$MASTER_PORT "$@" \\
    "export=$SLURM_EXPORT_ENV cpus=$SLURM_CPUS_PER_TASK gpus=$SLURM_GPUS_PER_TASK"
}
. "$0"
"""


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file(name):
    """Slurm starts the job with all nodes; after a failure, it ends all or, elastic, none."""
    by_gpu = environment() | {"SLURM_CPUS_PER_GPU": "4"}  # if not, --cpus-per-task is the job's own
    for env, cpus in (by_gpu, ""), (environment(), "1"):
        command = "bash", "-c", PRETEND_SLURM, ROOT / name, "50", "10"
        lines = run(*command, env=env).stdout.splitlines()
        assert lines[-3:] == ["50", "10", f"export= cpus={cpus} gpus="]
    text = (ROOT / name).read_text()
    if "#SBATCH --nodes=1\n" not in text:
        assert "#SBATCH --wait-all-nodes=1\n" in text
        assert [line for line in lines if line.endswith(":20007")]  # the port of job 7 alone
        if "elastic" in name:
            assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=60"} <= set(lines)
        else:
            assert "--kill-on-bad-exit=1" in lines


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file_alone(name, tmp_path):
    """What a copied job file lacks is said as it starts, in a line."""
    requeues = "slurm/requeue.sh" in (ROOT / name).read_text()
    for missing in ["requeue.sh", ".venv"] if requeues else [".venv"]:
        result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
        assert result.returncode == 1 and result.stdout == ""
        assert missing in result.stderr and result.stderr.count("\n") == 1
        (tmp_path / "slurm").mkdir(exist_ok=True)
        shutil.copy(ROOT / "slurm" / "requeue.sh", tmp_path / "slurm")
    # Of docs/containers.md: in place of activating .venv.
    (tmp_path / "slurm" / "site.sh").write_text(snippet("containers.md", "module load"))
    result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
    assert re.match(r"module load .*\n(.*\n)*network ib0\n", result.stdout), result


SCONTROL = """#!/bin/sh
echo "$@" | grep requeue || echo "node1 $RECORD StartTime=2 PreemptTime=2"
"""
FAILS = re.sub(r"scontrol(.*\n)*}", "srun() { false; }", PRETEND_SLURM)


@pytest.mark.parametrize("name", ["preemptible", "elastic_ddp"])
@pytest.mark.parametrize(
    ("record", "job"), [("ArrayJobId=3", "3_4"), ("", "7")], ids=["array task", "started by one"]
)
def test_preempted_job_requeues_itself(tmp_path, name, record, job):
    """Also if an array task has submitted it, whose variables it has."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    env = environment() | {"RECORD": record, "SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "4"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    result = run("bash", "-c", FAILS, ROOT / "slurm" / f"{name}.sbatch", env=env)
    assert result.stdout == f"requeue {job}\n", result.stderr


# The last epoch ends at the signal of a time limit, which Slurm is at first too busy to pass on.
ENDS = """srun() { trap 'exit 0' TERM; kill -USR1 $$; while :; do sleep 0.1; done; }
scancel() { [[ -v asked ]] || { asked=1; return 1; }; kill $!; }
sleep() { command sleep 0.1; }"""
ENDS = re.sub(r"srun(.*\n)*}", ENDS, PRETEND_SLURM)


@pytest.mark.parametrize("name", ["preemptible", "elastic_ddp"])
def test_complete_at_the_time_limit(name):
    result = run("bash", "-c", ENDS, ROOT / "slurm" / f"{name}.sbatch")
    assert (result.returncode, result.stderr) == (0, "")


SITES = sorted((ROOT / "slurm" / "sites").glob("*.sh"), key=lambda path: path.name)
PRETEND_SITE = """
set -eo pipefail
module() { :; }
conda() { :; }
. "$0"
PATH=$1 srun --label --ntasks=2 torchrun --nnodes=2 train.py
"""


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_site(path, tmp_path):
    """The lines of a center are sourced as site.sh, name their source, and start torchrun."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    result = run("bash", "-c", PRETEND_SITE, path, f"{tmp_path}:/usr/bin:/bin")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("--label --ntasks=2 ")
    assert result.stdout.endswith(" torchrun --nnodes=2 train.py\n")
    head = r"# Read in the source below, not run by us\..*https://.*\((\w+ \d+, 20\d\d)\)"
    assert re.search(head, path.read_text(), re.DOTALL)
