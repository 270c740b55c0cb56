"""The one list of which file builds on which. Run as a script, it prints the size of each step."""

import argparse
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Step(NamedTuple):
    base: str | None  # None: where the series starts
    file: str
    max_changed_lines: int  # a ceiling for `changed_lines`


STEPS = [
    Step("singlegpu.py", "multigpu.py", 42),
    Step("multigpu.py", "multigpu_torchrun.py", 21),
    Step("multigpu_torchrun.py", "multinode.py", 15),
    Step("multinode.py", "resumable.py", 42),
    Step("resumable.py", "preemptible.py", 29),
    Step("preemptible.py", "elastic_ddp.py", 40),
]
JOB_STEPS = [
    Step("slurm/singlegpu.sbatch", "slurm/multigpu.sbatch", 8),
    Step("slurm/multigpu.sbatch", "slurm/multigpu_torchrun.sbatch", 8),
    Step("slurm/multigpu_torchrun.sbatch", "slurm/multinode.sbatch", 13),
    Step("slurm/multinode.sbatch", "slurm/multinode_srun.sbatch", 15),
    Step("slurm/multinode.sbatch", "slurm/preemptible.sbatch", 11),
    Step("slurm/preemptible.sbatch", "slurm/elastic_ddp.sbatch", 15),
]
RECIPES = [
    Step("multinode.py", "recipes/mixed_precision.py", 18),
    Step("multinode.py", "recipes/gradient_accumulation.py", 18),
    Step("multinode.py", "recipes/evaluate.py", 42),
    Step("recipes/evaluate.py", "recipes/images.py", 63),
    Step("multinode.py", "recipes/tensorboard_logging.py", 19),
    Step("recipes/tensorboard_logging.py", "recipes/monitor.py", 47),
    Step("recipes/monitor.py", "recipes/stragglers.py", 41),
    Step("multinode.py", "recipes/profiler.py", 16),
    Step("multinode.py", "recipes/verify.py", 49),
    Step("multinode.py", "recipes/fsdp.py", 56),
]
LATER_RECIPES = [  # of stages that save within an epoch
    Step("preemptible.py", "recipes/step_timeout.py", 32),
    Step("elastic_ddp.py", "recipes/own_disks.py", 27),
    Step("elastic_ddp.py", "recipes/stream.py", 84),
    Step("elastic_ddp.py", "recipes/save_after_failure.py", 43),
]
BY_HAND = [
    Step("multigpu_torchrun.py", "by_hand/ddp.py", 45),
    Step("by_hand/ddp.py", "by_hand/zero.py", 76),
    Step("by_hand/zero.py", "by_hand/fsdp.py", 81),
    Step("multigpu_torchrun.py", "by_hand/tensor_parallel.py", 69),
]
GPT = [
    Step("preemptible.py", "gpt/gpt.py", 147),  # the model comes
    Step("gpt/gpt.py", "gpt/evaluate.py", 54),
    Step("gpt/evaluate.py", "gpt/schedule.py", 27),
    Step("gpt/schedule.py", "gpt/metrics.py", 53),
    Step("gpt/metrics.py", "gpt/skip_steps.py", 30),
    Step("gpt/skip_steps.py", "gpt/pretrain.py", 31),
    Step("gpt/pretrain.py", "gpt/dcp.py", 88),
    Step("gpt/dcp.py", "gpt/fsdp.py", 45),
    Step("gpt/fsdp.py", "gpt/accumulate.py", 18),
    Step("gpt/accumulate.py", "gpt/keep_snapshots.py", 15),
    Step("gpt/keep_snapshots.py", "gpt/async_save.py", 32),
    Step("gpt/async_save.py", "gpt/tokens.py", 93),
    Step("gpt/tokens.py", "gpt/llama.py", 111),
    Step("gpt/llama.py", "gpt/documents.py", 55),
    Step("gpt/llama.py", "gpt/chunked_loss.py", 27),
    Step("gpt/accumulate.py", "gpt/finetune.py", 238),  # 104 of them are the GPT, which goes
    Step("gpt/finetune.py", "gpt/frozen_layers.py", 22),
    Step("gpt/frozen_layers.py", "gpt/finetune_chat.py", 108),
    Step("gpt/fsdp.py", "gpt/hsdp.py", 17),
    Step("gpt/fsdp.py", "gpt/tensor_parallel.py", 45),
    Step("gpt/llama.py", "gpt/llama_tensor_parallel.py", 66),
    Step("gpt/fsdp.py", "gpt/pipeline_parallel.py", 114),
    Step("gpt/pipeline_parallel.py", "gpt/three_d.py", 44),
    Step("gpt/fsdp.py", "gpt/context_parallel.py", 69),
    Step("gpt/fsdp.py", "gpt/moe.py", 70),
    Step("gpt/moe.py", "gpt/expert_parallel.py", 82),
    Step("gpt/fsdp.py", "gpt/muon.py", 63),
    Step("gpt/pretrain.py", "gpt/slow_network.py", 13),
    Step("gpt/fsdp.py", "gpt/local_sgd.py", 56),
]
PORTS = [  # of scripts on one device, typical but our own: the whole series in one step
    Step("ports/images_single.py", "ports/images.py", 135),
    Step("ports/text_single.py", "ports/text.py", 125),
    Step("ports/gan_single.py", "ports/gan.py", 134),
    Step("ports/recurrent_single.py", "ports/recurrent.py", 125),
    Step("ports/vae_single.py", "ports/vae.py", 150),
]
STAGES = [STEPS[0].base, *(step.file for step in STEPS)]
ALL = STEPS + JOB_STEPS + RECIPES + LATER_RECIPES + BY_HAND + GPT


def diff_lines(old, new):
    """Returns the changed lines of two files, as `diff -U0` finds them, without blank ones."""
    command = ["diff", "-U0", old, new]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if result.returncode > 1:
        raise FileNotFoundError(result.stderr.strip())
    return [line for line in result.stdout.splitlines()[2:] if re.match("[+-].", line)]


def changed_lines(old, new):
    """Returns what `diff -U0 old new | grep -c '^[+-][^+-]'` prints."""
    return sum(line[1] not in "+-" for line in diff_lines(old, new))


def sizes():
    """Returns one line per step: its files and how many of their lines differ."""
    return [
        f"{s.base} -> {s.file}: {changed_lines(s.base, s.file)} of {s.max_changed_lines}"
        for s in ALL + PORTS
    ]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(*sizes(), sep="\n")
