"""How fast recipes/gpt.py trains on one GPU, beside nanoGPT's loop on the same model: make gpu

First, the tests that need a GPU. Then each variant trains two epochs in a process of its own. The
second epoch counts, since the first compiles and warms up; nothing is saved or evaluated.
"""

import argparse
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from recipes import gpt  # noqa: E402

# Dense bfloat16 TFLOP/s, from NVIDIA's data sheets (GeForce: the Ada whitepaper, with float32
# accumulation). Most sheets print twice as much, "with sparsity".
PEAK_TFLOPS = {
    "A100-PCIE-40GB": 312,
    "A100-SXM4-40GB": 312,
    "A100 80GB PCIe": 312,
    "A100-SXM4-80GB": 312,
    "B200": 2250,
    "GeForce RTX 4090": 165,
    "H100 80GB HBM3": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H200": 989,
    "L40S": 362,
}
VARIANTS = {
    "recipes/gpt.py": ["gpu.py"],
    "recipes/gpt.py --compile": ["gpu.py", "--compile"],
    "nanoGPT's loop": ["nanogpt_loop.py"],
    "nanoGPT's loop, compiled": ["nanogpt_loop.py", "--compile"],
}
BATCH_SIZES = [64, 32, 16, 8, 4, 2, 1]
CONTEXT, STEPS = 1024, 20


def train(args):
    """Trains as recipes/gpt.py does, but without what is not measured: 14 GB to save, for one."""
    gpt.Trainer._save_snapshot = lambda self: None
    gpt.Trainer._evaluate = lambda self: math.nan
    gpt.GPT.generate = lambda self, prompt, max_new_tokens: ""
    gpt.main(0, args)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")


def text_options(folder, chunks, context):
    """Returns --text with a file of random letters, unless the default text has `chunks`."""
    default = Path(os.__file__).parent.glob("*.py")
    if sum(len(gpt.TextDataset(path, context)) for path in default) >= chunks:
        return []
    print("Python's own source code is too short: training on random letters instead", flush=True)
    path = folder / "letters.txt"
    letters = random.Random(0).choices(b"abcdefghijklmnopqrstuvwxyz \n", k=chunks * context + 1)
    path.write_bytes(bytes(letters))
    return ["--text", str(path)]


def run(command):
    """Returns what `command` prints, or None if the GPU's memory is too small for it."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode == 0:
        return result.stdout
    if "out of memory" in result.stdout:
        return None
    sys.exit(f"{result.stdout}\nfailed: {' '.join(command)}")


def benchmark(variants, options, batch_sizes):
    """Yields the rows of the table. A variant starts with the batch size of the one before it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    sizes = list(batch_sizes)
    for name, (script, *flags) in variants.items():
        command = [*torchrun, str(ROOT / "bench" / script), "2", "1", *flags, *options]
        output = None
        while output is None:
            if not sizes:
                sys.exit("a batch of one does not fit in memory: try make gpu LAYERS=12")
            print(f"{name}, batch size {sizes[0]} …", flush=True)
            output = run([*command, "--batch_size", str(sizes[0])])
            if output is None:
                print(f"out of memory with a batch size of {sizes.pop(0)}", flush=True)
        tokens_per_second, mfu = re.findall(r"(\S+) tokens/s, MFU (\S+)%", output)[-1]
        memory = re.search(r"peak memory (\S+) GB", output)[1]
        yield f"| {name} | {sizes[0]} | {tokens_per_second} | {mfu} % | {memory} GB |"


def report(device, rows):
    """Returns the table, in Markdown; `device` is the name of the GPU."""
    title = f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    header = [f"| {title} | batch size | tokens/s | MFU | peak memory |", "|---|---|---|---|---|"]
    return "\n".join([*header, *rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peak_tflops", type=float, help="of the GPU in bfloat16, dense")
    parser.add_argument("--layers", type=int, default=24, help="of 50 million weights each")
    args = parser.parse_args()
    if args.layers < 1 or (args.peak_tflops or 1) <= 0:
        parser.error("--layers and --peak_tflops must be more than 0")
    if not torch.cuda.is_available():
        check = '.venv/bin/python -c "import torch; torch.cuda.init()"'
        sys.exit(f"no NVIDIA GPU is visible: nvidia-smi and {check} tell why")
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        sys.exit(f"{device} does not compute in bfloat16: use a newer GPU")
    peak_tflops = args.peak_tflops or PEAK_TFLOPS.get(device)
    if not peak_tflops:
        sys.exit(f"look up the dense bfloat16 TFLOP/s of {device}, for make gpu PEAK_TFLOPS=…")
    if torch.cuda.device_count() > 1:
        print(f"of {torch.cuda.device_count()} GPUs, the benchmark uses the first", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu"], cwd=ROOT)
    options = f"--layers {args.layers} --heads 32 --context {CONTEXT} --learning_rate 3e-4"
    options += f" --steps_per_epoch {STEPS} --peak_tflops {peak_tflops}"
    with tempfile.TemporaryDirectory() as folder:
        text = text_options(Path(folder), gpt.VAL_CHUNKS + BATCH_SIZES[0] * STEPS, CONTEXT)
        snapshot = ["--snapshot_path", os.path.join(folder, "none.pt")]
        rows = list(benchmark(VARIANTS, [*options.split(), *text, *snapshot], BATCH_SIZES))
    print(report(device, rows))
    sys.exit(tests.returncode)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by `benchmark`
        train(gpt.parse_args())
    else:
        main()
