"""Measures on GPUs, and can write sections of docs/field_reports.md

    python -m bench.gpu gpt --peak_tflops 989
    python -m bench.gpu stages

`gpt` compares gpt/pretrain.py with nanoGPT's loop, on one GPU and the same model. The peak speed of
the GPU stands in its data sheet: for bfloat16, without sparsity. Each variant trains two epochs in
a process of its own. The second epoch counts, since the first compiles and warms up; nothing is
saved or evaluated. `stages` trains the stages on all GPUs. With `--report FILE`, each row is
appended to the file as soon as it is there, a failure as well.
"""

import argparse
import functools
import itertools
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
from tools.formulas.calculator import BFLOAT16, USABLE_MEMORY
from tools.formulas.memory import GPT, memory
from tools.launch.snapshots import write_text
from tools.steps import STAGES

VARIANTS = {
    "gpt/pretrain.py": "bench.gpu",
    "gpt/pretrain.py --compile": "bench.gpu --compile",
    "nanoGPT's loop": "bench.nanogpt_loop",
    "nanoGPT's loop, compiled": "bench.nanogpt_loop --compile",
}
BATCH_SIZES = [16, 8, 4, 2, 1]  # 16 fits into 80 GB
N_HEAD, N_EMBD, CONTEXT = 16, 2048, 1024  # heads of 128, as in large models
EPOCH_S = 150  # at an MFU of 40 %: long enough for a GPU to get hot
FEW_EPOCHS, MANY_EPOCHS = 2, 202  # of the stages
TIME_LIMIT_S = 900  # of a variant, or of a stage


class FailedError(Exception):
    """What has ended a command, in one line."""


def train(args):
    """Trains as gpt/pretrain.py does, but without what is not measured: 14 GB to save, for one."""
    pretrain.Trainer._save_snapshot = lambda self: None
    pretrain.Trainer._evaluate = lambda self: None
    pretrain.main(args)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


def run(command):
    """Returns what a command prints; raises FailedError if it fails, or does not end in time."""
    status, output = launch.run(command, TIME_LIMIT_S)
    if status == 0:
        return output
    print(*output.splitlines()[-50:], f"failed: {command}", sep="\n", flush=True)
    if status is None:
        raise FailedError(f"no end in {TIME_LIMIT_S} s")
    if "out of memory" in output:
        raise FailedError("out of memory")
    errors = re.findall(r"\w+(?:Error|Exception): .+", output)
    raise FailedError([f"status {status}", *errors][-1].replace("|", "/"))


def model_of(n_layer):
    params = 12 * n_layer * N_EMBD**2 + (2 * 256 + CONTEXT) * N_EMBD
    return GPT(params, n_layer, N_EMBD, 256, CONTEXT)


def batch_size_that_fits(n_layer, gpu_memory):
    """Returns the largest of BATCH_SIZES for which all parts fit, so that no variant changes it."""
    model = model_of(n_layer)
    for size in BATCH_SIZES:
        if memory(model, size, BFLOAT16)["peak"] <= USABLE_MEMORY * gpu_memory:
            return size
    sys.exit("a batch of one does not fit in memory: try --layers 12")


def gpt_rows(variants, options, batch_size, steps, folder):
    """Yields the table of the variants. In `folder`, it writes a text of so many batches."""
    yield "| variant | batch size | tokens/s | MFU | peak memory |"
    yield "|---|---|---|---|---|"
    text = folder / "text"
    write_text(text, 1 + steps * batch_size, CONTEXT)
    options += f" --text {text} --snapshot_path {folder}/none.pt --context {CONTEXT} --generate 0"
    options += f" --log_every_steps {steps} --val_tokens {CONTEXT} --batch_size {batch_size}"
    for name, module in variants.items():
        print(f"{name} …", flush=True)
        try:
            output = run(f"torchrun --standalone --nproc_per_node=1 -m {module} 2 1 {options}")
        except FailedError as error:
            yield f"| {name} | {batch_size} | failed: {error} | | |"
            continue
        # Of the last epoch, not of the whole training.
        tokens_per_second, mfu = re.findall(r"(\S+) tokens/s, MFU (\S+)%(?! in all)", output)[-1]
        peak = re.search(r"peak memory (\S+) GB", output)[1]
        yield f"| {name} | {batch_size} | {tokens_per_second} | {mfu} % | {peak} GB |"


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
        print(f"{stage} …", flush=True)
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


def publish(lines, path):
    """Prints each line as soon as it is there, and appends it to a file, if one is named."""
    for line in lines:
        print(line, flush=True)
        if path:
            with path.open("a") as file:
                file.write(f"{line}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["gpt", "stages"])
    parser.add_argument("--peak_tflops", type=float, help="in bfloat16, dense; gpt needs it")
    parser.add_argument("--layers", type=int, default=24, help="of 50 million weights each")
    parser.add_argument("--report", type=Path, help="a file, to which a section is appended")
    args = parser.parse_args()
    if args.report and not os.access(args.report.parent, os.W_OK):
        parser.error(f"cannot write {args.report}: create its folder, or set another path")
    if args.what == "gpt" and args.peak_tflops is None:
        parser.error("gpt needs --peak_tflops, which stands in the GPU's data sheet")
    if args.layers < 1 or (args.peak_tflops is not None and args.peak_tflops <= 0):
        parser.error("--layers and --peak_tflops must be more than 0")
    if not torch.cuda.is_available():
        check = '.venv/bin/python -c "import torch; torch.cuda.init()"'
        sys.exit(f"no NVIDIA GPU is visible: nvidia-smi and {check} tell why")
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        sys.exit(f"{device} does not compute in bfloat16: use a newer GPU")
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "stages":
            title, rows = f"{gpus} x {device}", stage_rows(gpus, Path(folder))
        else:
            options = f"--n_layer {args.layers} --n_head {N_HEAD} --n_embd {N_EMBD}"
            options += f" --learning_rate 3e-4 --peak_tflops {args.peak_tflops}"
            batch_size = batch_size_that_fits(
                args.layers, torch.cuda.get_device_properties(0).total_memory
            )
            flops_per_step = model_of(args.layers).flops_per_token * batch_size * CONTEXT
            steps = math.ceil(EPOCH_S * 0.4 * args.peak_tflops * 1e12 / flops_per_step)
            title, rows = device, gpt_rows(VARIANTS, options, batch_size, steps, Path(folder))
        heading = ["", f"## {args.what}: {title}", "", f"{date.today()}: {versions()}", ""]
        publish(itertools.chain(heading, rows), args.report)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by `gpt_rows`
        train(pretrain.parse_args())
    else:
        main()
