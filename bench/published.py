"""Compares the calculator's speeds with published ones, on H100: python -m bench.published

llm-foundry's table (scripts/train/benchmarking/README.md in mosaicml/llm-foundry, "H100 80GB BF16"
and "Large Scale"): its runs with FULL_SHARD of models of 3 billion parameters and more. The two
utilizations of tools/formulas/scaling.py come from those on up to 64 GPUs, with contexts of up to
4,096 tokens, where communication hides; all other runs test them.
"""

import argparse
import statistics

from tools.formulas.calculator import Way, step_of, two_digits
from tools.formulas.memory import GPT
from tools.formulas.scaling import H100

SHAPES = {  # blocks and channels, from its yamls/pretrain
    "MPT 70B": (80, 8192),
    "MPT 30B": (48, 7168),
    "MPT 13B": (40, 5120),
    "MPT 7B": (32, 4096),
    "MPT 3B": (32, 2560),
}
MPT_VOCAB_SIZE = 50368
# Model, context, samples per GPU, whether it recomputes activations; then the tokens per second of
# each GPU, by the number of GPUs.
LLM_FOUNDRY = [
    ("MPT 13B", 2048, 2, False, {8: 4792, 16: 4767, 32: 4811, 64: 4800}),
    ("MPT 7B", 2048, 6, False, {8: 10643, 128: 10475, 256: 10119, 512: 9670}),
    ("MPT 3B", 512, 40, False, {8: 27965}),
    ("MPT 3B", 1024, 20, False, {8: 27046}),
    ("MPT 3B", 2048, 10, False, {16: 24142}),
    ("MPT 3B", 2048, 6, False, {32: 23021, 64: 22525}),
    ("MPT 3B", 4096, 5, False, {8: 20964}),
    ("MPT 3B", 8192, 3, False, {8: 16578}),
    ("MPT 3B", 16384, 1, False, {8: 11152}),
    ("MPT 70B", 2048, 2, True, {32: 882}),
    ("MPT 70B", 2048, 8, True, {64: 1039, 128: 1058, 256: 1035, 512: 1007}),
    ("MPT 30B", 1024, 6, True, {8: 2084}),
    ("MPT 30B", 2048, 3, True, {8: 2002}),
    ("MPT 30B", 2048, 10, True, {16: 2263}),
    ("MPT 30B", 2048, 14, True, {32: 2308}),
    ("MPT 30B", 2048, 8, True, {128: 2199, 256: 2148, 512: 2115}),
    ("MPT 30B", 4096, 1, True, {8: 1802}),
    ("MPT 30B", 8192, 1, True, {8: 1384}),
    ("MPT 13B", 1024, 40, True, {8: 5502}),
    ("MPT 13B", 2048, 16, True, {128: 5080, 256: 4989, 512: 4952}),
    ("MPT 13B", 4096, 10, True, {8: 4717}),
    ("MPT 13B", 16384, 3, True, {8: 2985}),
    ("MPT 13B", 32768, 1, True, {8: 1976}),
    ("MPT 7B", 1024, 64, True, {8: 10203}),
    ("MPT 7B", 4096, 16, True, {8: 8611}),
    ("MPT 7B", 8192, 8, True, {8: 6935}),
    ("MPT 7B", 32768, 2, True, {8: 3318}),
    ("MPT 7B", 65536, 1, True, {8: 1956}),
    ("MPT 3B", 32768, 3, True, {8: 5873}),
    ("MPT 3B", 65536, 1, True, {8: 3262}),
]
# torchtitan's benchmarks/llama3_h100_202412_torchtitan.md and, with TP 8 ("vanilla"),
# asyncTP_llama3_h100_2025-06_torchtitan.md; all compiled, in bfloat16, with a context of 8,192. The
# 8B recomputes selected operations only, which counts here as none.
LLAMA_8B = GPT(8.03e9, 32, 4096, 128256, 8192)
LLAMA_70B = GPT(70.6e9, 80, 8192, 128256, 8192)
TORCHTITAN = [  # GPUs, samples of each or of a tensor parallel group, and tokens per second and GPU
    ("Llama 3.1 8B", LLAMA_8B, 8, 2, Way("FSDP", 8), 6667),
    ("Llama 3.1 8B", LLAMA_8B, 128, 2, Way("FSDP", 128), 6514),
    ("Llama 3.1 8B", LLAMA_8B, 64, 12, Way("FSDP, TP 8", 64, tp=8), 4378),
    ("Llama 3.1 70B", LLAMA_70B, 256, 16, Way("FSDP, recompute, TP 8", 256, True, tp=8), 597),
]


def runs():
    """Returns all runs of both tables, each as a row of TORCHTITAN."""
    found = []
    for name, context, samples, recompute, speeds in LLM_FOUNDRY:
        n_layer, n_embd = SHAPES[name]
        params = 12 * n_layer * n_embd**2 + (2 * MPT_VOCAB_SIZE + context) * n_embd
        model = GPT(params, n_layer, n_embd, MPT_VOCAB_SIZE, context)
        for gpus, speed in speeds.items():
            way = Way("FSDP, recompute" if recompute else "FSDP", gpus, recompute)
            found.append((name, model, gpus, samples, way, speed))
    return found + TORCHTITAN


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
    for name, model, gpus, samples, way, published in runs():
        tokens, seconds = step_of(way, H100, model, gpus, samples)
        calculated = tokens / seconds / gpus
        error = calculated / published - 1
        flops = model.flops_per_token * (4 / 3 if way.recompute else 1)
        print(f"{name + ', ' + way.name:<38}{model.context:>8,}{gpus:>6}", end="")
        print(f"{published:>11,}{two_digits(calculated):>12}{error:>7.0%}")
        group = groups.setdefault((group_of(name, model, gpus), way.recompute), [])
        group.append((error, published * flops / H100.flops))
    return groups


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    groups = compare()
    print(f"\n{'':<46}{'runs':>5}{'utilization':>13}{'error':>7}{'from':>7}{'to':>6}")
    for (group, recompute), values in groups.items():
        errors, utilizations = zip(*values, strict=True)
        name = f"{group}, {'recompute' if recompute else 'no recomputation'}"
        print(f"{name:<46}{len(errors):>5}{statistics.median(utilizations):>13.0%}", end="")
        print(f"{statistics.median(errors):>+7.0%}{min(errors):>+7.0%}{max(errors):>+6.0%}")


if __name__ == "__main__":
    main()
