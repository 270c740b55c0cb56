"""Compares gpt/pretrain.py with nanoGPT's loop, on one GPU and the same model

    python -m bench.gpu --peak_tflops 989

The peak speed of the GPU stands in its data sheet: for bfloat16, without sparsity. Each variant
trains two epochs in a process of its own. The second epoch counts, since the first compiles and
warms up; nothing is saved or evaluated. With `--report FILE`, the stages train, too, on all GPUs,
and a section for docs/field_reports.md is written.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from bench import launch
from gpt import pretrain
from tools.launch.snapshots import write_text
from tools.steps import STAGES

VARIANTS = {
    "gpt/pretrain.py": "bench.gpu",
    "gpt/pretrain.py --compile": "bench.gpu --compile",
    "nanoGPT's loop": "bench.nanogpt_loop",
    "nanoGPT's loop, compiled": "bench.nanogpt_loop --compile",
}
BATCH_SIZES = [64, 32, 16, 8, 4, 2, 1]
N_HEAD, N_EMBD, CONTEXT = 32, 2048, 1024
STEPS = 20  # per epoch
FEW_EPOCHS, MANY_EPOCHS = 2, 202  # of the stages


def log_throughput(trainer):
    """Stands in for `Trainer._evaluate`."""
    tokens = trainer.tokens - trainer.tokens_before
    trainer._log(trainer._throughput(tokens, trainer.time_before))
    trainer._restart_clock()


def train(args):
    """Trains as gpt/pretrain.py does, but without what is not measured: 14 GB to save, for one."""
    pretrain.Trainer._save_snapshot = lambda self: None
    pretrain.Trainer._evaluate = log_throughput
    pretrain.main(args)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


def run(command):
    """Returns what `command` prints, or None if the GPU's memory is too small for it."""
    status, output = launch.run(command)
    if status == 0:
        return output
    if "out of memory" in output:
        return None
    sys.exit(f"{output}\nfailed: {command}")


def benchmark(variants, options, batch_sizes, context, folder):
    """Yields the rows of the table. A variant starts with the batch size of the one before it.

    In `folder`, it writes a text of `STEPS` batches.
    """
    text = folder / "text"
    options += f" --text {text} --snapshot_path {folder}/none.pt --context {context} --generate 0"
    options += f" --eval_every_steps {STEPS} --val_tokens {context}"
    sizes = list(batch_sizes)
    for name, module in variants.items():
        torchrun = f"torchrun --standalone --nproc_per_node=1 -m {module} 2 1 {options}"
        output = None
        while output is None:
            if not sizes:
                sys.exit("a batch of one does not fit in memory: try --layers 12")
            print(f"{name}, batch size {sizes[0]} …", flush=True)
            write_text(text, 1 + STEPS * sizes[0], context)
            output = run(f"{torchrun} --batch_size {sizes[0]}")
            if output is None:
                print(f"out of memory with a batch size of {sizes.pop(0)}", flush=True)
        # Of the last epoch: the line of the whole training ends with other words.
        tokens_per_second, mfu = re.findall(r"(\S+) tokens/s, MFU (\S+)%$", output, re.M)[-1]
        memory = re.search(r"peak memory (\S+) GB", output)[1]
        yield f"| {name} | {sizes[0]} | {tokens_per_second} | {mfu} % | {memory} GB |"


def report(device, rows):
    """Returns the table, in Markdown; `device` is the name of the GPU."""
    title = f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    header = [f"| {title} | batch size | tokens/s | MFU | peak memory |", "|---|---|---|---|---|"]
    return "\n".join([*header, *rows])


def stage_command(stage, gpus):
    """Returns what trains a stage with the same global batches on any number of GPUs."""
    if stage == "singlegpu.py":
        return f"python {stage} --batch_size {32 * gpus}"
    if stage == "multigpu.py":
        return f"python {stage} --batch_size 32"
    torchrun = f"torchrun --standalone --nproc_per_node={gpus} {stage}"
    if stage == "elastic_ddp.py":
        return f"{torchrun} --global_batch_size {32 * gpus}"
    return f"{torchrun} --batch_size 32"


def train_stage(command, epochs, path):
    """Returns the loss of the last epoch, and the seconds that all has taken."""
    start_time = time.perf_counter()
    output = launch.output_of(f"{command} --snapshot_path {path} {epochs} {epochs}")
    return float(re.findall(r"loss (\S+) \| saved", output)[-1]), time.perf_counter() - start_time


def stage_rows(gpus, folder):
    """Yields a row per stage: whether its loss is that of one CPU, and the time of a step."""
    reference = f"env CUDA_VISIBLE_DEVICES= {stage_command('singlegpu.py', gpus)}"
    expected, _ = train_stage(reference, FEW_EPOCHS, folder / "reference.pt")
    for stage in STAGES:
        print(f"{stage} …", flush=True)
        command = stage_command(stage, gpus)
        loss, few_seconds = train_stage(command, FEW_EPOCHS, folder / f"{stage}.pt")
        _, many_seconds = train_stage(command, MANY_EPOCHS, folder / f"{stage}.pt")  # resumes
        equal = "equal" if math.isclose(loss, expected, rel_tol=1e-3) else f"not {expected}"
        steps = (MANY_EPOCHS - 2 * FEW_EPOCHS) * math.ceil(2048 / (32 * gpus))
        seconds = (many_seconds - few_seconds) / steps  # starting took both runs the same time
        yield f"| `{stage}` | {loss}, {equal} | {seconds:.5f} |"


def versions():
    """Returns those of all that a report names."""
    query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
    driver = launch.output_of(query).split("\n")[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return (
        f"driver {driver}, CUDA {torch.version.cuda}, NCCL {nccl}, torch {torch.__version__}, "
        f"Python {sys.version.split()[0]}"
    )


def field_report(title, versions, table, stages):
    """Returns a section of docs/field_reports.md."""
    header = ["| stage | loss, and that of one CPU | seconds per step |", "|---|---|---|"]
    lines = [f"## {title}", "", f"{date.today()}: {versions}", "", table, "", *header, *stages]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak_tflops", type=float, required=True, help="in bfloat16, dense")
    parser.add_argument("--layers", type=int, default=24, help="of 50 million weights each")
    parser.add_argument("--report", type=Path, help="a file, to be written")
    args = parser.parse_args()
    if args.report and not os.access(args.report.parent, os.W_OK):
        parser.error(f"cannot write {args.report}: create its folder, or set another path")
    if args.layers < 1 or args.peak_tflops <= 0:
        parser.error("--layers and --peak_tflops must be more than 0")
    if not torch.cuda.is_available():
        check = '.venv/bin/python -c "import torch; torch.cuda.init()"'
        sys.exit(f"no NVIDIA GPU is visible: nvidia-smi and {check} tell why")
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        sys.exit(f"{device} does not compute in bfloat16: use a newer GPU")
    options = f"--n_layer {args.layers} --n_head {N_HEAD} --n_embd {N_EMBD}"
    options += f" --learning_rate 3e-4 --peak_tflops {args.peak_tflops}"
    with tempfile.TemporaryDirectory() as folder:
        rows = list(benchmark(VARIANTS, options, BATCH_SIZES, CONTEXT, Path(folder)))
        table = report(device, rows)
        print(table)
        if args.report:
            gpus = torch.cuda.device_count()
            stages = list(stage_rows(gpus, Path(folder)))
            args.report.write_text(field_report(f"{gpus} x {device}", versions(), table, stages))
            print(f"wrote {args.report}")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by `benchmark`
        train(pretrain.parse_args())
    else:
        main()
