"""The one list of which file builds on which. Run as a script, it prints the size of each step."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    base: str | None  # None: where the series starts
    file: str
    most: int  # changed lines that the step may have, by `changed_lines`
    idea: str


STEPS = [
    Step("singlegpu.py", "multigpu.py", 34, "one process a GPU, gradients averaged"),
    Step(
        "multigpu.py",
        "multigpu_torchrun.py",
        16,
        "torchrun starts the processes, and restarts them",
    ),
    Step(
        "multigpu_torchrun.py",
        "multinode.py",
        12,
        "many machines: the global rank speaks and saves",
    ),
    Step("multinode.py", "elastic_ddp.py", 90, "machines come and go, and nothing is lost"),
]
JOB_STEPS = [
    Step("slurm/singlegpu.sbatch", "slurm/multigpu.sbatch", 10, "every GPU of the node"),
    Step("slurm/multigpu.sbatch", "slurm/multigpu_torchrun.sbatch", 9, "torchrun"),
    Step("slurm/multigpu_torchrun.sbatch", "slurm/multinode.sbatch", 23, "a torchrun a node"),
    Step("slurm/multinode.sbatch", "slurm/multinode_srun.sbatch", 28, "no torchrun"),
    Step("slurm/multinode.sbatch", "slurm/elastic_ddp.sbatch", 85, "a new step after each failure"),
]
RECIPES = [
    Step("multinode.py", f"recipes/{name}.py", most, idea)
    for name, most, idea in [
        ("mixed_precision", 20, "half the bits where they suffice"),
        ("gradient_accumulation", 20, "batches that no device has room for"),
        ("evaluate", 35, "held-out loss and accuracy, each sample counted once"),
        ("tensorboard_logging", 15, "curves that a restart does not break"),
        ("fsdp", 45, "a model that no device has room for"),
        ("gpt", 140, "your own model, data and loss"),
    ]
]
ALL = STEPS + JOB_STEPS + RECIPES


def changed_lines(old, new):
    """Returns what `diff -U0 old new | grep -c '^[+-][^+-]'` prints."""
    result = subprocess.run(["diff", "-U0", old, new], cwd=ROOT, capture_output=True, text=True)
    if result.returncode > 1:
        raise FileNotFoundError(result.stderr.strip())
    return len(re.findall(r"^[+-][^+\-\n]", result.stdout, re.MULTILINE))


def sizes():
    """Returns one line a step: its files and how many of their lines differ."""
    return [f"{s.base} -> {s.file}: {changed_lines(s.base, s.file)} of {s.most}" for s in ALL]


if __name__ == "__main__":
    print(*sizes(), sep="\n")
