"""Prints which ways to train a GPT fit on a GPU, and how fast they are

    python -m tools.formulas.calculator --params 8e9 --gpus 64

The formula of the memory is that of memory.py, that of the speed is scaling.py's.
"""

import argparse
import math
from typing import NamedTuple

from tools.formulas.memory import BLOCK_TYPES, GPT, memory
from tools.formulas.scaling import H100, step_time

CHANNELS_PER_LAYER = 128  # GPT-3 6.7B and Llama 3 8B have 32 layers of 4096
VOCAB_SIZE = 128256  # Llama 3's
USABLE_MEMORY = 0.9  # CUDA, NCCL and fragments need the rest
BFLOAT16 = 2  # bytes
TP_BYTES = 3  # per number sent: bfloat16 of the matrices, float32 of the norms


class Way(NamedTuple):
    """A way to train; `shards` GPUs share the state, `tp` and `pp` are the sizes of the groups."""

    name: str
    shards: int
    recompute: bool = False
    tp: int = 1
    pp: int = 1


def gpt_of_size(params, vocab_size, context, n_layer=None, n_embd=None):
    """Returns a GPT of `params` parameters, with shapes of usual proportions where none are given.

    A block has 12 n_embd^2 weights.
    """
    width = CHANNELS_PER_LAYER
    while n_embd is None:
        wider = width + CHANNELS_PER_LAYER
        blocks = 12 * wider**3 / CHANNELS_PER_LAYER
        if blocks + (2 * vocab_size + context) * wider > params:
            n_embd = width
        width = wider
    model = GPT(params, 1, n_embd, vocab_size, context)
    return model._replace(n_layer=n_layer or max(1, round(model.block_params / (12 * n_embd**2))))


def tensor_parallel_time(hardware, model, samples, tp, recompute):
    """Returns the time of the collectives within layers, for which the GPU waits.

    Each block gathers twice and reduce-scatters twice, forward, backward and when recomputed.
    """
    size = TP_BYTES * samples * model.context * model.n_embd
    seconds = (tp - 1) * (hardware.nvlink_latency + size / tp / hardware.nvlink_bandwidth)
    return (12 if recompute else 8) * model.n_layer * seconds


def ways_to_train(gpus, gpus_per_node, tp, pp):
    ways = [Way("DDP", 1), Way("DDP, recompute", 1, True)]
    if gpus > 1:
        ways += [Way("FSDP", gpus), Way("FSDP, recompute", gpus, True)]
    if gpus > gpus_per_node and gpus % gpus_per_node == 0:
        ways += [Way("HSDP, recompute", gpus_per_node, True)]
    if tp > 1:
        ways += [Way(f"FSDP, recompute, TP {tp}", gpus, True, tp)]
    if pp > 1:
        ways += [Way(f"FSDP, TP {tp}, PP {pp}", gpus, False, tp, pp)]
        ways += [Way(f"FSDP, recompute, TP {tp}, PP {pp}", gpus, True, tp, pp)]
    return ways


def print_memory(args, model):
    """Returns the ways that fit."""
    print(
        f"{model.params / 1e9:g} billion parameters: {model.n_layer} blocks of {model.n_embd} "
        f"channels, a vocabulary of {model.vocab_size:,}\n"
        f"GPUs: {args.gpus}, with {args.batch_size} x {model.context:,} tokens each (or each "
        f"tensor parallel group), in bfloat16\n"
    )
    loss = {"compiled": args.compile, "chunks": args.loss_chunks}
    ways = {
        way: memory(model, args.batch_size, BFLOAT16, *way[1:], **loss)
        for way in ways_to_train(args.gpus, H100.gpus_per_node, args.tp_size, args.pp_size)
    }
    fitting = []
    name_width = max(21, *(len(way.name) for way in ways))
    widths = {part: max(8, len(part) + 2) for part in next(iter(ways.values()))}
    titles = "".join(f"{part:>{width}}" for part, width in widths.items())
    print(f"{'GB per GPU':<{name_width}}{titles}  fits")
    for way, parts in ways.items():
        cells = "".join(f"{parts[part] / 1e9:>{width}.1f}" for part, width in widths.items())
        fits = parts["peak"] <= USABLE_MEMORY * args.gpu_memory
        print(f"{way.name:<{name_width}}{cells}{'yes' if fits else 'no':>6}")
        if fits:
            fitting.append(way)
    return fitting


def step_of(way, hardware, model, gpus, samples, micro_batches=1):
    """Returns the tokens of a step, and its time.

    A tensor parallel group is like one larger GPU, which also waits for its collectives; and a
    pipeline, whose stages gather their parts of the model at the same time.
    """
    _, shards, recompute, tp, pp = way
    group = hardware._replace(
        flops=hardware.flops * tp * pp,
        gpus_per_node=hardware.gpus_per_node // tp,
        nvlink_bandwidth=hardware.nvlink_bandwidth * tp,
    )
    groups = gpus // (tp * pp)
    micro_batches = micro_batches if pp > 1 else 1
    tokens = samples * micro_batches * model.context * groups
    with_bubble = (micro_batches + pp - 1) / micro_batches
    flops = model.flops_per_token * tokens * with_bubble
    shards = min(shards, groups)
    blocks = model.n_layer // pp + 1
    sizes = (groups, model.params / pp, flops, shards, recompute, blocks)
    seconds, _ = step_time(group, *sizes, is_stage=pp > 1)
    waiting = tensor_parallel_time(hardware, model, samples, tp, recompute)
    return tokens, seconds + waiting * with_bubble * micro_batches / pp


def two_digits(number):
    """Returns `number` as a formula's result is quoted: rounded to two digits, with commas."""
    rounded = float(f"{number:.1e}")
    decimals = max(0, 1 - math.floor(math.log10(rounded)))
    return f"{rounded:,.{decimals}f}"


def print_speed(args, model, ways):
    hardware = H100._replace(network_bandwidth=args.network_bandwidth)
    heading = f"H100, {8 * args.network_bandwidth / 1e9:,.0f} Gbit/s per node"
    print(f"\n{heading:<32}{'tokens/step':>12}{'s/step':>12}{'tokens/s':>12}")
    for way in ways:
        sizes = (model, args.gpus, args.batch_size, args.micro_batches)
        tokens, seconds = step_of(way, hardware, *sizes)
        speed = two_digits(tokens / seconds)
        print(f"{way.name:<32}{tokens:>12,}{two_digits(seconds):>12} {speed:>11}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=float, required=True, help="of a GPT, such as 8e9")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--gpu_memory", type=float, default=80e9, help="in bytes")
    parser.add_argument("--batch_size", type=int, default=1, help="per GPU, or per TP group")
    parser.add_argument("--context", type=int, default=8192, help="in tokens")
    parser.add_argument("--vocab_size", type=int, default=VOCAB_SIZE, help="by default Llama 3's")
    parser.add_argument("--n_layer", type=int, help="by default fitting --params, as --n_embd")
    parser.add_argument("--n_embd", type=int)
    parser.add_argument("--block", choices=BLOCK_TYPES, default="gpt", help="of which file of gpt/")
    parser.add_argument("--tp_size", type=int, help="by default a node, if --gpus allow it")
    parser.add_argument("--pp_size", type=int, default=1, help="stages of a pipeline")
    parser.add_argument("--micro_batches", type=int, default=8, help="of a pipeline")
    bandwidth = H100.network_bandwidth
    parser.add_argument("--network_bandwidth", type=float, default=bandwidth, help="of a node")
    parser.add_argument("--compile", action="store_true", help="the loss; blocks count as without")
    parser.add_argument("--loss_chunks", type=int, default=1, help="as in gpt/chunked_loss.py")
    args = parser.parse_args()
    if args.tp_size is None:
        args.tp_size = math.gcd(args.gpus, H100.gpus_per_node)
    numbers = [value for value in vars(args).values() if type(value) in (int, float)]
    if not all(1 <= number < math.inf for number in numbers):
        parser.error("all numbers must be 1 or more")
    if args.gpu_memory < 1e9:
        parser.error("--gpu_memory is in bytes, such as 80e9")
    if args.gpus % args.tp_size or H100.gpus_per_node % args.tp_size:
        parser.error("--tp_size must divide --gpus and the 8 GPUs of a node")
    if args.gpus % (args.tp_size * args.pp_size):
        parser.error("--pp_size times --tp_size must divide --gpus")
    model = gpt_of_size(args.params, args.vocab_size, args.context, args.n_layer, args.n_embd)
    model = model._replace(block=BLOCK_TYPES[args.block])
    if model.block_params <= 0:
        parser.error("the embedding and the head alone have --params: lower --vocab_size")
    return args, model


def main():
    args, model = parse_args()
    fitting = print_memory(args, model)
    if fitting:
        print_speed(args, model, fitting)
    else:
        print("\nnothing fits: use more GPUs, a smaller --batch_size or a shorter --context")


if __name__ == "__main__":
    main()
