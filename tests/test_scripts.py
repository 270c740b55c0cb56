"""Each target of make, and each script of bench/ and tools/, is run by a test."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NIGHTLY, needs_slurm

from tools.steps import ROOT

LONG = [pytest.mark.long]
WITH_BENCH = pytest.mark.skipif(
    not (ROOT / ".venv" / "bench").exists(), reason="get what it compares with: make .venv/bench"
)
# What is run here, at its smallest size, and something that it prints.
COMMANDS = [
    pytest.param("make help", "make cascade"),
    pytest.param("make lint", "ruff format --check"),
    pytest.param("make check STAGE=singlegpu FILE=singlegpu.py", "  ok  ", marks=LONG),
    pytest.param("python tools/steps.py", "singlegpu.py -> multigpu.py: "),
    pytest.param("python tools/steps.py --help", "usage: steps.py"),
    pytest.param("python -m tools.chain.run --help", "usage: run.py"),
    pytest.param("python -m tools.pages.check_docs --help", "usage: check_docs.py"),
    pytest.param("python -m tools.judge.faults 1", "class Trainer:"),
    pytest.param("python -m bench.scaling", "best interval"),
    pytest.param("python -m bench.recovery_time 1", "regroup.py: ", marks=NIGHTLY),
    pytest.param(
        "make bench BENCH_ARGS='--rounds 1 --epochs 1'",
        "x raw DDP",
        marks=[*LONG, WITH_BENCH],
    ),
    pytest.param("make chaos FAULTS=1 SEED=354", ": good", marks=[*LONG, needs_slurm]),
]
# Of the other targets, what they run is tested below or elsewhere.
TARGETS = {
    "run": "python -m tools.chain.run",
    "test": "pytest",
    "long": "pytest -m long",
    "docs": "python -m tools.pages.check_docs",
    "cascade": "python -m tools.chain.cascade",
}
# What the tests of another file run, and where it says so.
ELSEWHERE = {
    "bench/calculator.py": ("test_cost.py", "calculator.main()"),
    "bench/cost.py": ("test_cost.py", '"bench.cost"'),
    "bench/gpu.py": ("test_gpu_bench.py", "bench.gpu"),
    "bench/nanogpt_loop.py": ("test_gpu_bench.py", "gpu.VARIANTS"),
    "bench/measure.py": ("test_gpu_bench.py", "bench.measure"),
    "bench/overlap.py": ("test_by_hand.py", "bench/overlap.py"),
    "bench/memory_peaks.py": ("test_memory.py", "memory_peaks.run("),
    "tools/chain/run.py": ("test_path.py", "tools.chain.run"),
    "tools/chain/cascade.py": ("test_project.py", "tools.chain.cascade"),
    "tools/pages/check_docs.py": ("test_docs.py", "tools.pages.check_docs"),
    "tools/pages/minimap.py": ("test_pictures.py", '"minimap"'),
    "tools/pages/charts.py": ("test_pictures.py", '"charts"'),
    "tools/pages/experts.py": ("test_pictures.py", '"experts"'),
    "tools/pages/fsdp_calls.py": ("test_pictures.py", '"fsdp_calls"'),
    "tools/pages/placements.py": ("test_pictures.py", '"placements"'),
}


def make(arguments):
    """Returns a command whose environment is that of this test, and stays as it is."""
    return f"make -o requirements.txt -o requirements-dev.txt -o constraints.txt {arguments}"


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_command(command, output):
    if command.startswith("make "):
        command = make(command.removeprefix("make "))
    result = run(command)
    assert result.returncode == 0, result.stdout + result.stderr
    assert output in result.stdout


def run(command):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )


def test_all_have_a_test():
    rows = [row.values[0] for row in COMMANDS]
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) <= 10
    for target in targets:
        if not any(row.split()[:2] == ["make", target] for row in rows):
            assert TARGETS[target] in run(make(f"--dry-run {target}")).stdout
    scripts = {
        str(path.relative_to(ROOT))
        for folder in ("bench", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if "\nif __name__ ==" in path.read_text()
    }
    assert ELSEWHERE.keys() <= scripts
    by_target = {"bench/epoch_time.py", "tools/judge/check.py", "tools/chain/chaos.py"}
    for script in scripts - by_target:
        module = script.removesuffix(".py").replace("/", ".")
        if not any(script in row or module in row for row in rows):
            file, call = ELSEWHERE[script]
            assert call in (ROOT / "tests" / file).read_text()
