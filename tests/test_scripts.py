"""Each target of make, and each script of bench/ and tools/, is run by a test."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NIGHTLY, ROOT, needs_slurm

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
    pytest.param("python -m tools.judge.faults 1", "class Trainer:"),
    pytest.param("python bench/recovery_time.py 1", "regroup.py: ", marks=NIGHTLY),
    pytest.param(
        "python bench/epoch_time.py --rounds 1 --epochs 1",
        "x raw DDP",
        marks=[*LONG, WITH_BENCH],
    ),
    pytest.param("make chaos FAULTS=1 SEED=354", ": good", marks=[*LONG, needs_slurm]),
]
# What the tests of another file run. (`make test` and `make long` run these.)
ELSEWHERE = {
    "make run": "test_project.py",
    "make docs": "test_docs.py",
    "make cascade": "test_project.py",
    "make bench": "test_scripts.py",
    "bench/cost.py": "test_cost.py",
    "bench/formula.py": "test_cost.py",
    "bench/gpu.py": "test_gpu_bench.py",
    "bench/nanogpt_loop.py": "test_gpu_bench.py",
    "bench/measure.py": "test_gpu_bench.py",
    "bench/memory_peaks.py": "test_memory.py",
    "tools/chain/chaos.py": "test_scripts.py",
    "tools/chain/run.py": "test_project.py",
    "tools/chain/cascade.py": "test_project.py",
    "tools/judge/check.py": "test_check.py",
    "tools/pages/check_docs.py": "test_docs.py",
    "tools/pages/charts.py": "test_pictures.py",
    "tools/pages/fsdp_calls.py": "test_pictures.py",
    "tools/pages/pipeline.py": "test_pictures.py",
    "tools/pages/placements.py": "test_pictures.py",
}


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_command(command, output):
    # The environment is that of this test, and stays as it is.
    settled = "-o requirements.txt -o requirements-dev.txt -o constraints.txt"
    result = subprocess.run(
        command.replace("make", f"make {settled}").split(),
        cwd=ROOT,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert output in result.stdout


def test_all_have_a_test():
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(targets) <= 10
    scripts = [
        str(path.relative_to(ROOT))
        for folder in ("bench", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if "\nif __name__ ==" in path.read_text()
    ]
    run_here = " ".join(row.values[0] for row in COMMANDS)
    named = {f"make {target}" for target in targets} - {"make test", "make long"}
    for name in [*named, *scripts]:
        module = name.removesuffix(".py").replace("/", ".")
        if name not in run_here and module not in run_here:
            assert Path(name.split()[-1]).stem in (ROOT / "tests" / ELSEWHERE[name]).read_text()
