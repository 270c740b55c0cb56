"""docs/large_clusters.md: compares the calculator's speeds with published ones, on H100

published.csv has llm-foundry's table (scripts/train/benchmarking/README.md in mosaicml/llm-foundry,
"H100 80GB BF16" and "Large Scale"): its runs with FULL_SHARD of models of 3 billion parameters and
more. The two utilizations of tools/formulas/scaling.py come from those on up to 64 GPUs, with
contexts of up to 4,096 tokens, where communication hides; all other runs test them.

Its Llamas are torchtitan's, of benchmarks/llama3_h100_202412_torchtitan.md and, with TP 8
("vanilla"), asyncTP_llama3_h100_2025-06_torchtitan.md; all compiled, in bfloat16. The 8B recomputes
selected operations only, which counts here as none. The samples are those of a GPU, or of a tensor
parallel group.
"""

import csv
import statistics
from pathlib import Path

from tools.formulas.calculator import Way, step_of, two_digits
from tools.formulas.memory import GPT
from tools.formulas.scaling import H100

SHAPES = {  # blocks and channels; MPT's from llm-foundry's yamls/pretrain
    "MPT 70B": (80, 8192),
    "MPT 30B": (48, 7168),
    "MPT 13B": (40, 5120),
    "MPT 7B": (32, 4096),
    "MPT 3B": (32, 2560),
    "Llama 3.1 8B": (32, 4096),
    "Llama 3.1 70B": (80, 8192),
}
LLAMA_PARAMS = {"Llama 3.1 8B": 8.03e9, "Llama 3.1 70B": 70.6e9}
LLAMA_VOCAB_SIZE, MPT_VOCAB_SIZE = 128256, 50368


def model_of(name, context):
    n_layer, n_embd = SHAPES[name]
    if name in LLAMA_PARAMS:
        return GPT(LLAMA_PARAMS[name], n_layer, n_embd, LLAMA_VOCAB_SIZE, context)
    params = 12 * n_layer * n_embd**2 + (2 * MPT_VOCAB_SIZE + context) * n_embd
    return GPT(params, n_layer, n_embd, MPT_VOCAB_SIZE, context)


def group_of(name, model, gpus):
    """Returns which runs a run is counted with."""
    if "Llama" in name:
        return "torchtitan's"
    if model.context > 4096:
        return "contexts of 8,192 to 65,536"
    return "128 to 512 GPUs" if gpus > 64 else "8 to 64 GPUs"


def compare():
    """Prints each run; returns errors and published utilizations of each group, with its way."""
    print(f"{'tokens/s per GPU':<38}{'context':>8}{'GPUs':>6}", end="")
    print(f"{'published':>11}{'calculated':>12}{'error':>7}")
    groups = {}
    _, *runs = csv.reader(Path(__file__).with_suffix(".csv").read_text().splitlines())
    for name, *sizes, recomputes, gpus, speed in runs:
        context, samples, tp, gpus, published = map(int, [*sizes, gpus, speed])
        recompute = recomputes == "yes"
        title = "FSDP, recompute" if recompute else "FSDP"
        way = Way(f"{title}, TP {tp}" if tp > 1 else title, gpus, recompute, tp)
        model = model_of(name, context)
        tokens, seconds = step_of(way, H100, model, gpus, samples)
        calculated = tokens / seconds / gpus
        error = calculated / published - 1
        flops = model.flops_per_token * (4 / 3 if recompute else 1)
        print(f"{name + ', ' + way.name:<38}{context:>8,}{gpus:>6}", end="")
        print(f"{published:>11,}{two_digits(calculated):>12}{error:>7.0%}")
        group = groups.setdefault((group_of(name, model, gpus), recompute), [])
        group.append((error, published * flops / H100.flops))
    return groups


def report(rounds=None):
    groups = compare()
    print(f"\n{'':<46}{'runs':>5}{'utilization':>13}{'error':>7}{'from':>7}{'to':>6}")
    for (group, recompute), values in groups.items():
        errors, utilizations = zip(*values, strict=True)
        name = f"{group}, {'recompute' if recompute else 'no recomputation'}"
        print(f"{name:<46}{len(errors):>5}{statistics.median(utilizations):>13.0%}", end="")
        print(f"{statistics.median(errors):>+7.0%}{min(errors):>+7.0%}{max(errors):>+6.0%}")
