"""The one list of which file builds on which. Run as a script, it prints the size of each step."""

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    base: str | None  # None: where the series starts
    file: str
    max_changed_lines: int  # a ceiling for `changed_lines`
    idea: str


STEPS = [
    Step("singlegpu.py", "multigpu.py", 42, "one process per GPU, gradients averaged"),
    Step("multigpu.py", "multigpu_torchrun.py", 20, "torchrun starts and restarts the processes"),
    Step("multigpu_torchrun.py", "multinode.py", 16, "several nodes, the global rank"),
    Step("multinode.py", "elastic_ddp.py", 130, "nodes come and go, and no step is lost"),
]
JOB_STEPS = [
    Step("slurm/singlegpu.sbatch", "slurm/multigpu.sbatch", 8, "every GPU of the node"),
    Step("slurm/multigpu.sbatch", "slurm/multigpu_torchrun.sbatch", 8, "torchrun"),
    Step("slurm/multigpu_torchrun.sbatch", "slurm/multinode.sbatch", 16, "a torchrun on each node"),
    Step("slurm/multinode.sbatch", "slurm/multinode_srun.sbatch", 16, "no torchrun"),
    Step("slurm/multinode.sbatch", "slurm/elastic_ddp.sbatch", 91, "a new step after each failure"),
]
RECIPES = [
    Step("multinode.py", f"recipes/{name}.py", max_changed_lines, idea)
    for name, max_changed_lines, idea in [
        ("mixed_precision", 20, "half the bits where they suffice"),
        ("gradient_accumulation", 24, "batches that do not fit on a device"),
        ("evaluate", 38, "val loss and accuracy, each sample counted once"),
        ("tensorboard_logging", 18, "curves that a restart does not break"),
        ("fsdp", 52, "a model that does not fit on a device"),
        ("gpt", 175, "your own model, data and loss"),
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
    """Returns one line per step: its files and how many of their lines differ."""
    return [
        f"{s.base} -> {s.file}: {changed_lines(s.base, s.file)} of {s.max_changed_lines}"
        for s in ALL
    ]


if __name__ == "__main__":
    print(*sizes(), sep="\n")
