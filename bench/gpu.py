"""How fast gpt/pretrain.py trains on one GPU, beside nanoGPT's loop on the same model: bench/gpu.py

First, the tests that need a GPU. Then each variant trains two epochs in a process of its own, on as
much of Python's own source code as they need. The second epoch counts, since the first compiles and
warms up; nothing is saved or evaluated.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from gpt import pretrain  # noqa: E402

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
    "gpt/pretrain.py": ["gpu.py"],
    "gpt/pretrain.py --compile": ["gpu.py", "--compile"],
    "nanoGPT's loop": ["nanogpt_loop.py"],
    "nanoGPT's loop, compiled": ["nanogpt_loop.py", "--compile"],
}
BATCH_SIZES = [64, 32, 16, 8, 4, 2, 1]
N_HEAD, N_EMBD, CONTEXT = 32, 2048, 1024
STEPS = 20  # per epoch


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


def write_text(path, chunks, context):
    """Writes so many chunks of Python's own source code, over and over if it is too short."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    source_code = b"".join(file.read_bytes() for file in files)
    size = chunks * context + 1
    path.write_bytes((source_code * (size // len(source_code) + 1))[:size])


def run(command):
    """Returns what `command` prints, or None if the GPU's memory is too small for it."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode == 0:
        return result.stdout
    if "out of memory" in result.stdout:
        return None
    sys.exit(f"{result.stdout}\nfailed: {' '.join(command)}")


def benchmark(variants, options, batch_sizes, context, folder):
    """Yields the rows of the table. A variant starts with the batch size of the one before it.

    In `folder`, it writes a text of `STEPS` batches.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    sizes = list(batch_sizes)
    text = folder / "text"
    options = [*options, "--context", str(context), "--text", str(text)]
    options += ["--eval_every_steps", str(STEPS), "--val_tokens", str(context)]
    options += ["--generate", "0", "--snapshot_path", str(folder / "none.pt")]
    for name, (script, *flags) in variants.items():
        command = [*torchrun, str(ROOT / "bench" / script), "2", "1", *flags, *options]
        output = None
        while output is None:
            if not sizes:
                sys.exit("a batch of one does not fit in memory: try --layers 12")
            print(f"{name}, batch size {sizes[0]} …", flush=True)
            write_text(text, 1 + STEPS * sizes[0], context)
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
        sys.exit(f"look up the dense bfloat16 TFLOP/s of {device}, for --peak_tflops")
    if torch.cuda.device_count() > 1:
        print(f"of {torch.cuda.device_count()} GPUs, the benchmark uses the first", flush=True)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu"], cwd=ROOT)
    options = f"--n_layer {args.layers} --n_head {N_HEAD} --n_embd {N_EMBD}"
    options += f" --learning_rate 3e-4 --peak_tflops {peak_tflops}"
    with tempfile.TemporaryDirectory() as folder:
        rows = list(benchmark(VARIANTS, options.split(), BATCH_SIZES, CONTEXT, Path(folder)))
    print(report(device, rows))
    sys.exit(tests.returncode)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by `benchmark`
        train(pretrain.parse_args())
    else:
        main()
