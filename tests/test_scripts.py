"""The targets of make, and scripts of bench/ and tools/ that no other test runs."""

import shlex

import pytest
from helpers import NIGHTLY, needs_slurm, run

from tools.steps import ROOT

LONG = [pytest.mark.long]
WITH_BENCH = pytest.mark.skipif(
    not (ROOT / ".venv" / "bench").exists(), reason="get what it compares with: make .venv/bench"
)
OLD_FILES = "-o requirements.txt -o requirements-dev.txt -o constraints.txt"
# What is run here, at its smallest size, and something that it prints.
COMMANDS = [
    pytest.param("make help", "make cascade"),
    pytest.param("make lint", "ruff format --check"),
    pytest.param("make --dry-run check STAGE=multigpu FILE=a.py", "judge.check multigpu 'a.py'"),
    pytest.param("python tools/steps.py", "singlegpu.py -> multigpu.py: "),
    pytest.param("python -m tools.chain.run --help", "usage: run.py"),
    pytest.param("python -m tools.judge.faults 1", "class Trainer:"),
    pytest.param("python -m bench.scaling", "best interval"),
    pytest.param("python -m bench.recovery_time 1", "regroup.py: ", marks=NIGHTLY),
    pytest.param(
        "make bench BENCH_ARGS='--rounds 1 --epochs 1'",
        "x raw DDP",
        marks=[*LONG, WITH_BENCH],
    ),
    pytest.param("make chaos FAULTS=1 SEED=281", ": good", marks=[*LONG, needs_slurm]),
]


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_command(command, output):
    # The environment is that of this test, and stays as it is.
    command = command.replace("make ", f"make {OLD_FILES} ")
    result = run(*shlex.split(command))
    assert result.returncode == 0, result.stdout + result.stderr
    assert output in result.stdout
