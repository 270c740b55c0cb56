"""What a step of data-parallel training takes, as one formula; and what follows from it

    step = computation + all-reduce - what of it hides behind the computation
    all-reduce = buckets x hops x latency + 2 (N - 1) / N x bytes / bandwidth

`bench/cost.py` fits it to this machine. Run as a script, it prints what it says of large clusters.
Times are in seconds, sizes in bytes, bandwidths in bytes per second.
"""

import math
import random
from typing import NamedTuple


def all_reduce(ranks, size, latency, bandwidth, buckets=1, hops=None):
    """Returns the time of all-reduces of `size` bytes in all, by default in a ring.

    A ring passes each byte on 2 (N - 1) / N times over each link (Patarasuk and Yuan 2009).
    """
    hops = 2 * (ranks - 1) if hops is None else hops
    return buckets * hops * latency + 2 * (ranks - 1) / ranks * size / bandwidth


def step(computation, communication, overlap):
    """Returns the time of a step; `overlap` is the part of the computation that can hide some."""
    return computation + max(0.0, communication - overlap * computation)


class Hardware(NamedTuple):
    """GPUs in nodes. The links of all GPUs of a node work at once: NCCL makes a ring of each."""

    name: str
    flops: float  # per second and GPU, of 16-bit matrix products
    utilization: float  # of these, what a training step achieves
    gpus_per_node: int
    bandwidth: float  # of a node's links together
    latency: float  # of a message between nodes


# FLOP/s: NVIDIA's H100 data sheet, SXM, without sparsity. Utilization: torchtitan's and
# llm-foundry's benchmarks, 0.33 to 0.46. Links: 8 of 400 Gbit/s, NVIDIA's DGX H100 data sheet.
# Latency: what NCCL's own model (tuning.cc) takes for a hop of a tree between nodes, LL128.
H100 = Hardware("H100, 8 x 400 Gbit/s", 989e12, 0.4, 8, 8 * 400e9 / 8, 8.5e-6)
ETHERNET = H100._replace(name="H100, 1 x 100 Gbit/s", bandwidth=100e9 / 8)

BYTES_PER_PARAMETER = 4  # float32 gradients; FSDP sends as much if it gathers 16-bit weights
OVERLAP = 2 / 3  # backward computes two thirds of a step's FLOPs
BUCKETS = 194  # DDP's, of Llama 3 8B: most of its matrices exceed 25 MB, and none is ever split


def efficiency(hardware, gpus, parameters, batch_tokens):
    """Returns which part of a step the GPUs compute, for a global batch of `batch_tokens`."""
    flops = 6 * parameters * batch_tokens / gpus  # forward and backward: PaLM, appendix B
    computation = flops / (hardware.flops * hardware.utilization)
    nodes = math.ceil(gpus / hardware.gpus_per_node)
    if nodes == 1:
        return 1.0
    size = BYTES_PER_PARAMETER * parameters
    hops = 2 * math.ceil(math.log2(nodes))  # NCCL: trees, where rings would be long
    communication = all_reduce(gpus, size, hardware.latency, hardware.bandwidth, BUCKETS, hops)
    return computation / step(computation, communication, OVERLAP)


# Tokens per second and GPU, from torchtitan's benchmarks/llama3_h100_202412_torchtitan.md (FSDP and
# torch.compile) and llm-foundry's scripts/train/benchmarking/README.md, both on H100: the model,
# its parameters, tokens per GPU and step, the two numbers of GPUs, and the two speeds.
PUBLISHED = [
    ("Llama 3.1 8B, torchtitan", 8.03e9, 16384, (8, 128), (6667, 6514)),
    ("MPT 13B, llm-foundry", 12.85e9, 4096, (8, 64), (4792, 4800)),
    ("MPT 1B, llm-foundry", 1.316e9, 40960, (16, 64), (46037, 44402)),
]


def straggling(ranks, spread, trials=200):
    """Simulates steps that wait for the slowest of all ranks; returns their mean slowdown.

    Each rank's time is normally distributed around 1, with `spread` as the standard deviation.
    """
    rng = random.Random(0)
    return sum(max(rng.gauss(1, spread) for _ in range(ranks)) for _ in range(trials)) / trials


# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4).
GPU_SECONDS_PER_FAILURE = 54 * 24 * 3600 * 16384 / 419


def best_interval(save, failure_interval):
    """Returns the time between two snapshots that loses least (Young 1974, Daly 2006)."""
    return math.sqrt(2 * save * failure_interval)


def lost_time(interval, save, restart, failure_interval, failures=2000):
    """Simulates training with failures; returns the part of the time that does not get on."""
    rng = random.Random(0)
    lost = total = 0.0
    for _ in range(failures):
        alive = rng.expovariate(1 / failure_interval)
        snapshots, unsaved = divmod(alive, interval + save)
        lost += snapshots * save + unsaved + restart
        total += alive + restart
    return lost / total


def print_clusters():
    gpus = [2**n for n in range(3, 15)]
    for hardware in (H100, ETHERNET):
        print(f"\nEfficiency, 8e9 parameters, {hardware.name}")
        print(f"{'tokens per step, GPUs:':<24}" + "".join(f"{n:>7}" for n in gpus))
        for tokens in (1e6, 4e6, 16e6):
            cells = "".join(f"{efficiency(hardware, n, 8e9, tokens):>7.0%}" for n in gpus)
            print(f"{tokens / 1e6:>6.0f} million{cells:>{10 + 7 * len(gpus)}}")


def print_published():
    print(f"\n{'Tokens per second and GPU':<28}{'GPUs':>11}{'published':>15}{'formula':>9}")
    for name, parameters, tokens, (few, many), (speed, published) in PUBLISHED:
        ratio = efficiency(H100, many, parameters, tokens * many)
        ratio /= efficiency(H100, few, parameters, tokens * few)
        cells = f"{few} to {many}".rjust(11) + f"{speed} to {published}".rjust(15)
        print(f"{name:<28}{cells}{speed * ratio:>9.0f} {speed * ratio / published - 1:+.0%}")


def print_stragglers():
    ranks = (8, 128, 1024, 16384)
    print(f"\n{'Slowdown by the slowest of':<28}" + "".join(f"{n:>8}" for n in ranks))
    for spread in (0.01, 0.05):
        cells = "".join(f"{straggling(n, spread):>8.3f}" for n in ranks)
        print(f"steps that vary by {spread:.0%}{cells:>{8 + 8 * len(ranks)}}")


def print_failures(save=30, restart=300):
    print(f"\nA snapshot takes {save} s, a restart {restart} s")
    print(f"{'GPUs':>6}{'failure every':>15}{'best interval':>15}{'lost':>8}{'hourly':>8}")
    for gpus in (128, 1024, 16384):
        between = GPU_SECONDS_PER_FAILURE / gpus
        interval = best_interval(save, between)
        lost = [lost_time(seconds, save, restart, between) for seconds in (interval, 3600)]
        times = f"{between / 3600:>13.1f} h{interval / 60:>11.0f} min"
        print(f"{gpus:>6}{times}{lost[0]:>8.1%}{lost[1]:>8.1%}")


if __name__ == "__main__":
    print_clusters()
    print_published()
    print_stragglers()
    print_failures()
