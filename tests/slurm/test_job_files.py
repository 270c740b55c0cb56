"""Each job file, read and run beside a stub of srun; test_slurm.py runs them on a real Slurm."""

import os
import re

import pytest
from helpers import LONG, first, run, snippet
from rankcheck.launch.jobs import environment

from tools import steps
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


SCONTROL = """#!/bin/sh
echo "$@" | grep requeue || echo "node1 $RECORD PreemptTime=${PREEMPTED:-None}"
"""


@pytest.fixture
def submitted(tmp_path):
    """A folder with all that a job file needs, and an scontrol that prints its requests."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / ".venv").mkdir()
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file(submitted, name):
    """Slurm starts the job with all nodes; after a failure, it ends all or, elastic, none."""
    by_gpu = environment() | {"SLURM_CPUS_PER_GPU": "4"}  # if not, --cpus-per-task is the job's own
    for env, cpus in (by_gpu, ""), (environment(), "1"):
        command = "bash", "-c", PRETEND_SLURM, ROOT / name, "50", "10"
        lines = run(*command, folder=submitted, env=env).stdout.splitlines()
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
    folder = tmp_path / "slurm"
    folder.mkdir()
    # Of docs/launchers.md: in place of activating .venv.
    site = snippet("launchers.md", "module load python")
    files = {"setup.sh": None, "site.sh": site, "requeue.sh": None}
    if "slurm/requeue.sh" not in (ROOT / name).read_text():
        del files["requeue.sh"]
    for missing, text in files.items():
        result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
        assert result.returncode == 1 and "network" not in result.stdout
        assert f"slurm/{missing}" in result.stderr and result.stderr.count("\n") == 1
        (folder / missing).write_text(text or (ROOT / "slurm" / missing).read_text())
    result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
    assert re.match(r"module load .*\n(.*\n)*network ib0\n", result.stdout), result


FAILS = re.sub(r"scontrol(.*\n)*}", "srun() { false; }", PRETEND_SLURM)


@pytest.mark.parametrize("name", ["preemptible", "elastic_ddp"])
@pytest.mark.parametrize(
    ("record", "job"), [("ArrayJobId=3", "3_4"), ("", "7")], ids=["array task", "started by one"]
)
def test_preempted_job_requeues_itself(submitted, name, record, job):
    """Also if an array task has submitted it, whose variables it has."""
    env = {"RECORD": record, "SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "4"}
    env |= {"PREEMPTED": "2026-11-24T21:44:19", "PATH": f"{submitted}:{os.environ['PATH']}"}
    job_file = ROOT / "slurm" / f"{name}.sbatch"
    result = run("bash", "-c", FAILS, job_file, folder=submitted, env=environment() | env)
    assert result.stdout == f"requeue {job}\n", result.stderr


@pytest.mark.parametrize("name", first(1, JOB_FILES[::-1], LONG))
def test_gpus_are_missing(submitted, name):
    """At first, this is the user's mistake; in a later life, Slurm's, and the job is requeued.

    As after a failure: no more than ten times if nothing is ever saved.
    """
    command = FAILS.replace("SLURM_GPUS_ON_NODE=2", "X=2"), ROOT / name, "50", "10"
    path = {"PATH": f"{submitted}:{os.environ['PATH']}"}
    for life in range(11):
        env = environment() | path | {"SLURM_RESTART_COUNT": f"{life}"}
        result = run("bash", "-c", *command, folder=submitted, env=env)
        if life == 0:
            assert "ask for GPUs, as with --gpus-per-node=4" in result.stderr
        else:
            assert "Slurm has started the job without its GPUs" in result.stderr
        requeued = 0 < life < 10
        assert result.stdout == ("requeue 7\n" if requeued else ""), result
        assert result.returncode == (not requeued)


@pytest.mark.parametrize(("status", "below"), [(0, ""), (1, "below\n")])
def test_lines_below_the_command(submitted, status, below):
    """As those of docs/recipes/step_timeout.md, they run after a failure only."""
    job_file = submitted / "job.sbatch"
    job_file.write_text((ROOT / "slurm" / "preemptible.sbatch").read_text() + "echo below\n")
    command = FAILS.replace("false", f"return {status}")
    env = environment() | {"PATH": f"{submitted}:{os.environ['PATH']}"}
    result = run("bash", "-c", command, job_file, folder=submitted, env=env)
    assert (result.stdout, result.returncode) == (below, 0), result


# The last epoch ends at the signal of a time limit, which Slurm is at first too busy to pass on.
ENDS = """srun() { trap 'exit 0' TERM; kill -USR1 $$; while :; do sleep 0.1; done; }
scancel() { [[ -v asked ]] || { asked=1; return 1; }; kill $!; }
sleep() { command sleep 0.1; }"""
ENDS = re.sub(r"srun(.*\n)*}", ENDS, PRETEND_SLURM)


@pytest.mark.parametrize("name", ["preemptible", "elastic_ddp"])
def test_complete_at_the_time_limit(submitted, name):
    result = run("bash", "-c", ENDS, ROOT / "slurm" / f"{name}.sbatch", folder=submitted)
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
