"""Trains the stages on all GPUs, and writes a section of docs/field_reports.md

    python -m bench.gpu | tee report.md

Is the loss that of CPUs, and how long does a step take? Each row is printed as soon as it is
there, a failure as well; its output goes to stderr.
"""

import functools
import math
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from bench import launch
from tools.steps import STAGES

FEW_EPOCHS, MANY_EPOCHS = 2, 202
TIME_LIMIT_S = 900  # of a stage


class FailedError(Exception):
    """What has ended a command, in one line."""


def log(*lines):
    print(*lines, sep="\n", file=sys.stderr)


def run(command):
    """Returns what a command prints; raises FailedError if it fails, or does not end in time."""
    status, output = launch.run(command, TIME_LIMIT_S)
    if status == 0:
        return output
    log(*output.splitlines()[-50:], f"failed: {command}")
    if status is None:
        raise FailedError(f"no end in {TIME_LIMIT_S} s")
    errors = re.findall(r"\w+(?:Error|Exception): .+", output)
    raise FailedError([f"status {status}", *errors][-1].replace("|", "/"))


def stage_command(stage, gpus):
    """Returns what trains a stage with the same global batches on any number of GPUs."""
    if stage == "singlegpu.py":
        return f"python {stage} --batch_size {32 * gpus}"
    if stage == "multigpu.py":
        return f"python {stage} --batch_size 32"
    command = f"torchrun --standalone --nproc_per_node={gpus} {stage}"
    if stage in STAGES[STAGES.index("resumable.py") :]:
        command += " --save_every_steps 1000000"
    if stage == "elastic_ddp.py":
        return f"{command} --global_batch_size {32 * gpus}"
    return f"{command} --batch_size 32"


def train_stage(command, epochs, path):
    """Returns the loss of the last epoch, and the seconds that all has taken."""
    start_time = time.perf_counter()
    output = run(f"{command} --snapshot_path {path} {epochs} {epochs}")
    return float(re.findall(r"loss (\S+) \| saved", output)[-1]), time.perf_counter() - start_time


def stage_rows(gpus, folder):
    """Yields the table of the stages: whether the loss is that of CPUs, and the time of a step."""
    yield "| stage | loss, and that of CPUs | seconds per step |"
    yield "|---|---|---|"
    # On three ranks, for instance, DistributedSampler takes a sample twice.
    sharded = "multinode.py" if 2048 % gpus else "singlegpu.py"

    @functools.cache
    def loss_on_cpus(stage):
        command = f"env CUDA_VISIBLE_DEVICES= {stage_command(stage, gpus)}"
        return train_stage(command, FEW_EPOCHS, folder / f"reference-{stage}.pt")[0]

    for stage in STAGES:
        log(f"{stage} …")
        command = stage_command(stage, gpus)
        try:
            whole = stage in ("singlegpu.py", "elastic_ddp.py")
            right = loss_on_cpus("singlegpu.py" if whole else sharded)
            loss, few_seconds = train_stage(command, FEW_EPOCHS, folder / f"{stage}.pt")
            _, many_seconds = train_stage(command, MANY_EPOCHS, folder / f"{stage}.pt")  # resumes
        except FailedError as error:
            yield f"| `{stage}` | failed: {error} | |"
            continue
        equal = "equal" if math.isclose(loss, right, rel_tol=1e-3) else f"not {right}"
        steps = (MANY_EPOCHS - 2 * FEW_EPOCHS) * math.ceil(2048 / (32 * gpus))
        seconds = (many_seconds - few_seconds) / steps  # starting took both runs the same time
        yield f"| `{stage}` | {loss}, {equal} | {seconds:.5f} |"


def versions():
    """Returns those of all that a report names."""
    status, output = launch.run("nvidia-smi --query-gpu=driver_version --format=csv,noheader", 60)
    driver = output.split("\n")[0] if status == 0 else "unknown"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}"
    )


def main():
    if not torch.cuda.is_available():
        check = '.venv/bin/python -c "import torch; torch.cuda.init()"'
        sys.exit(f"no NVIDIA GPU is visible: nvidia-smi and {check} tell why")
    gpus = torch.cuda.device_count()
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    print(f"\n## {gpus} x {device}\n\n{date.today()}: {versions()}\n")
    with tempfile.TemporaryDirectory() as folder:
        for row in stage_rows(gpus, Path(folder)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
