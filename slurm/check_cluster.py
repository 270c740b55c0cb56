"""Find slow nodes before a long job; start it as you start the job, for instance with

    sbatch slurm/multinode.sbatch slurm/check_cluster.py

Multiplies matrices on each device, then sends data between each two nodes, all their ranks at once.
Rank 0 prints a table, and names each node that is slow: its slowest device, or its connection to
the node that it reaches fastest, achieves less than half of the median of all nodes. To tell which
of two nodes has the slow connection takes a third.
"""

import datetime
import os
import socket
import statistics
import sys
import time
from collections import Counter

import torch
import torch.distributed as dist

SLOW = 0.5  # of the median
MEASURING_SECONDS = 1.0  # of each two nodes, about
TIMEOUT = datetime.timedelta(minutes=2)


def timed(function):
    """Returns the seconds that `function` takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fastest(function, repetitions):
    """Returns the least seconds that `function` took: what the hardware can do."""
    return min(timed(function) for _ in range(repetitions))


def measure_matmul(device):
    """Returns the TFLOP/s of the product of two square matrices."""
    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / fastest(lambda: matrix @ matrix, 50) / 1e12


def rounds(nodes):
    """Yields lists of disjoint pairs of nodes; together, each two nodes (circle method)."""
    circle = list(range(nodes + nodes % 2))  # an odd number of nodes: one rests in each round
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield [pair for pair in pairs if max(pair) < nodes]
        circle.insert(1, circle.pop())


def measure_bandwidth(partner, device):
    """Returns the Gbit/s between this rank and rank `partner`, there and back in turn.

    Only the lower of the two ranks knows when all has arrived; the other gets None.
    """
    size = 2**28 if device.type == "cuda" else 2**20
    data = torch.ones(size, dtype=torch.uint8, device=device)
    lower = dist.get_rank() < partner

    def send_and_return():
        for send in (lower, not lower):
            transfer = dist.send if send else dist.recv
            transfer(data, partner)

    send_and_return()  # connects the two
    # A slow connection is measured once, a fast one often: the lower rank decides.
    repetitions = torch.tensor(int(MEASURING_SECONDS / timed(send_and_return)) + 1, device=device)
    if lower:
        dist.send(repetitions, partner)
    else:
        dist.recv(repetitions, partner)
    seconds = fastest(send_and_return, repetitions.item())
    return 2 * 8 * size / seconds / 1e9 if lower else None


def measure(device, local_rank, local_world_size):
    """Returns this rank's node, its matmul speed, and its bandwidth to nodes of higher number."""
    node = dist.get_rank() // local_world_size
    matmul = measure_matmul(device)
    bandwidths = {}
    for pairs in rounds(dist.get_world_size() // local_world_size):
        dist.barrier()
        for pair in pairs:
            if node in pair:
                partner = sum(pair) - node
                rank = partner * local_world_size + local_rank
                bandwidth = measure_bandwidth(rank, device)
                if bandwidth:
                    bandwidths[partner] = bandwidth
    return {"host": socket.gethostname(), "matmul": matmul, "bandwidths": bandwidths}


def below_median(speeds):
    """Returns the nodes whose speed is less than half of the median of all."""
    limit = SLOW * statistics.median(speeds.values())
    return {node for node, speed in speeds.items() if speed < limit}


def report(results, local_world_size):
    """Prints a table of the nodes, and which are slow."""
    nodes = range(len(results) // local_world_size)
    hosts, matmul = {}, {}
    links = Counter()  # the bandwidth of each two nodes, of all their ranks together
    for node in nodes:
        ranks = results[node * local_world_size : (node + 1) * local_world_size]
        hosts[node] = ranks[0]["host"]
        matmul[node] = min(rank["matmul"] for rank in ranks)
        for rank in ranks:
            for partner, bandwidth in rank["bandwidths"].items():
                links[node, partner] += bandwidth
    network = {node: max(links[pair] for pair in links if node in pair) for node in nodes}
    slow_devices = below_median(matmul)
    slow_networks = below_median(network)
    print(f"{'node':<16}{'slowest device':>18}{'network':>18}")
    for node in nodes:
        line = f"{hosts[node]:<16}{matmul[node]:>10.3g} TFLOP/s{network[node]:>11.3g} Gbit/s"
        line += "  slow device" * (node in slow_devices)
        line += "  slow network" * (node in slow_networks)
        print(line)
    slow = [hosts[node] for node in nodes if node in slow_devices | slow_networks]
    print(f"slow nodes: {', '.join(slow) or 'none'}")


def main():
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this script with torchrun, as its first lines show")
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["WORLD_SIZE"]) == local_world_size:
        sys.exit("there is one node only: start this script on two or more")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(timeout=TIMEOUT)
        result = measure(device, local_rank, local_world_size)
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"{socket.gethostname()} does not reach all other nodes: {reason}")
    if dist.get_rank() == 0:
        report(results, local_world_size)
    time.sleep(0.1)  # CPU only: gloo's threads finish before Python exits (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
