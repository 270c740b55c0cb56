"""What a step of data-parallel training takes on large clusters: python -m tools.formulas.scaling

    step = computation + all-reduce - what of it hides behind the computation
    all-reduce = buckets x hops x latency + 2 (N - 1) / N x bytes / bandwidth

docs/choose.md fits this formula to one machine. Models of large clusters are sharded: there,
it counts all-gathers and reduce-scatters too.
Times are in seconds, sizes in bytes, bandwidths in bytes per second.
"""

import argparse
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
    """GPUs in nodes. The links of all GPUs of a node work at once: NCCL makes a ring of each.

    Bandwidths are in each direction, latencies those of a hop, of a ring if not named otherwise.
    """

    name: str
    flops: float  # per second and GPU, of 16-bit matrix products
    utilization: float  # of these, what a training step achieves
    recompute_utilization: float  # where it recomputes activations, with what that computes
    gpus_per_node: int
    nvlink_bandwidth: float  # of a GPU
    network_bandwidth: float  # of a node's links together
    nvlink_latency: float  # within a node
    network_latency: float  # between nodes
    tree_latency: float  # between nodes


# FLOP/s, NVLink: NVIDIA's H100 data sheet, SXM, without sparsity; its 900 GB/s are both directions.
# Utilization: medians of llm-foundry's runs on up to 64 GPUs (docs/large_clusters.md), rounded.
# Network: 8 links of 400 Gbit/s, NVIDIA's DGX H100 data sheet.
# Latencies: those of NCCL's own model (tuning.cc), of its protocol LL128.
H100 = Hardware(
    "8 x 400 Gbit/s per node",
    flops=989e12,
    utilization=0.42,
    recompute_utilization=0.55,
    gpus_per_node=8,
    nvlink_bandwidth=450e9,
    network_bandwidth=8 * 400e9 / 8,
    nvlink_latency=1.9e-6,
    network_latency=4.0e-6,
    tree_latency=8.5e-6,
)
ETHERNET = H100._replace(name="1 x 100 Gbit/s per node", network_bandwidth=100e9 / 8)

WEIGHT_BYTES = 2  # the all-gathers send bfloat16
GRADIENT_BYTES = 4  # gradients are summed in float32
STATE_BYTES = 16  # per parameter, in float32: the weight, its gradient, and AdamW's two averages
BLOCKS = 33  # of Llama 3 8B, each with its own collectives: 32, and the embedding with the head


def ring(hardware, gpus, size, blocks=BLOCKS):
    """Returns the time of all-gathers (or reduce-scatters) of `size` bytes in all, one per block.

    Each has N - 1 hops: on nodes of several GPUs, NCCL has no tree for them (NVIDIA/nccl#1473).
    """
    nodes = math.ceil(gpus / hardware.gpus_per_node)
    latency = (gpus - nodes) * hardware.nvlink_latency + (nodes - 1) * hardware.network_latency
    bandwidth = hardware.nvlink_bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, hardware.network_bandwidth)
    return blocks * latency + (gpus - 1) / gpus * size / bandwidth


def step_time(
    hardware, gpus, parameters, flops, shards, recompute=False, blocks=BLOCKS, is_stage=False
):
    """Returns the time of a step, of `flops` on all GPUs together, and that of its computation.

    `shards` GPUs share a replica of the model: 1 is DDP, the GPUs of a node are HSDP, all are FSDP.
    All communication of a pass can hide behind its computation; but a stage of a pipeline gathers
    once, and sums its gradients after the last micro-batch. What is computed a second time is part
    of the step, and not of its computation.
    """
    utilization = hardware.recompute_utilization if recompute else hardware.utilization
    forward_computation = flops / 3 / gpus / (hardware.flops * utilization)
    backward_computation = 2 * forward_computation
    gather = ring(hardware, shards, WEIGHT_BYTES * parameters, blocks)
    reduce_scatter = ring(hardware, shards, GRADIENT_BYTES * parameters, blocks)
    replicas = gpus // shards
    links = hardware.network_bandwidth
    if gpus <= hardware.gpus_per_node:
        links = hardware.nvlink_bandwidth
    gradient_all_reduce = all_reduce(
        replicas,
        GRADIENT_BYTES * parameters / shards,
        hardware.tree_latency,
        links / min(shards, hardware.gpus_per_node),  # each GPU sums its own shard
        blocks,
        hops=2 * math.ceil(math.log2(replicas)),
    )
    forward = max(forward_computation, gather)
    # The weights are gathered again. NVLink and the network work at the same time.
    recomputation = forward_computation if recompute else 0
    backward = max(
        backward_computation + recomputation, gather + reduce_scatter, gradient_all_reduce
    )
    if is_stage:
        backward = backward_computation + recomputation + reduce_scatter
    return forward + backward, forward_computation + backward_computation


def efficiency(hardware, gpus, parameters, batch_tokens, hsdp=True):
    """Returns which part of a step the GPUs compute, for a global batch of `batch_tokens`.

    HSDP shards the model over the GPUs of a node and replicates it over the nodes; without it,
    FSDP shards it over all GPUs.
    """
    shards = min(gpus, hardware.gpus_per_node) if hsdp else gpus
    flops = 6 * parameters * batch_tokens  # PaLM, appendix B
    step, computation = step_time(hardware, gpus, parameters, flops, shards)
    return computation / step


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
        lost += snapshots * save + restart + unsaved
        total += alive + restart
    return lost / total


def print_clusters(parameters=8e9):
    gpus = [2**n for n in range(3, 15)]
    model = f"{parameters / 1e9:.0f} billion parameters"
    state = STATE_BYTES * parameters / 1e9
    sharded = state / H100.gpus_per_node
    print(f"{model} with AdamW take {state:.0f} GB: with HSDP, {sharded:.0f} GB of each GPU")
    for hardware in (H100, ETHERNET):
        print(f"\nEfficiency, {model}, H100, {hardware.name}")
        print(f"{'tokens per step, GPUs:':<24}" + "".join(f"{n:>7}" for n in gpus))
        for name, hsdp in (("HSDP", True), ("FSDP over all GPUs", False)):
            print(name)
            for tokens in (1e6, 4e6, 16e6):
                shares = [efficiency(hardware, n, parameters, tokens, hsdp) for n in gpus]
                cells = "".join(f"{share:>7.0%}" for share in shares)
                print(f"{tokens / 1e6:>6.0f} million{cells:>{10 + 7 * len(gpus)}}")


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


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print_clusters()
    print_stragglers()
    print_failures()


if __name__ == "__main__":
    main()
