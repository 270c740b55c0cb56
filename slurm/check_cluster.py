"""Find slow nodes before a long job. Start it in the same way as the job, for instance with

    sbatch slurm/multinode.sbatch slurm/check_cluster.py

Multiplies matrices on each device, then sends data between pairs of nodes, all their ranks at once.
Each speed is the median of the second half of many repetitions, because a GPU that is too hot slows
down only after a while. Rank 0 prints a table, and names each node that is slow: one whose slowest
device is more than 10 % below the median of all nodes (on CPUs, half), or whose connection to the
node that it reaches fastest has less than half of the median. It takes a third node to tell which
of two has the slow connection.
"""

import datetime
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from itertools import islice

import torch
import torch.distributed as dist

# Fractions of the median of all nodes. Equal GPUs differ by a few percent; CPUs and networks that
# other jobs use differ by more.
SLOW = {"cuda": 0.9, "cpu": 0.5, "network": 0.5}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
MATMUL_SECONDS = {"cuda": 20, "cpu": 1}
NETWORK_SECONDS = 0.5  # about, for each pair of nodes and each direction
MIN_BYTES, MAX_BYTES = 2**20, 2**28
MAX_PARTNERS = 8  # per node
TIMEOUT = datetime.timedelta(minutes=10)


def timed(function):
    """Returns the seconds that `function` takes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def median_seconds(function, repetitions):
    """Returns the median of the seconds that `function` took, without the first half."""
    seconds = [timed(function) for _ in range(repetitions)]
    return statistics.median(seconds[repetitions // 2 :])


def measure_matmul(device):
    """Returns the TFLOP/s of the product of two square matrices."""
    size = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.randn(size, size, dtype=dtype, device=device)

    def multiply():
        return matrix @ matrix

    repetitions = int(MATMUL_SECONDS[device.type] / median_seconds(multiply, 10)) + 1
    return 2 * size**3 / median_seconds(multiply, repetitions) / 1e12


def rounds(nodes):
    """Yields lists of disjoint pairs of nodes, different ones each time (circle method)."""
    circle = list(range(nodes + nodes % 2))  # an odd number of nodes: one rests in each round
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        yield [pair for pair in pairs if max(pair) < nodes]
        circle.insert(1, circle.pop())


def measure_direction(sends, partner, device):
    """Returns the Gbit/s from this rank to rank `partner`, or from there if not `sends`."""
    max_size = MAX_BYTES if device.type == "cuda" else MIN_BYTES
    data = torch.ones(max_size, dtype=torch.uint8, device=device)

    def send_and_confirm(size):
        if sends:
            dist.send(data[:size], partner)
            dist.recv(data[:1], partner)  # until then, data may still be on its way
        else:
            dist.recv(data[:size], partner)
            dist.send(data[:1], partner)

    send_and_confirm(MIN_BYTES)  # connects the two
    # The sender decides: over a faster connection, more data are sent, and more often.
    repetitions = NETWORK_SECONDS / timed(lambda: send_and_confirm(MIN_BYTES))
    size = min(max_size, max(MIN_BYTES, int(MIN_BYTES * repetitions / 20)))
    plan = torch.tensor([size, int(repetitions * MIN_BYTES / size) + 1], device=device)
    if sends:
        dist.send(plan, partner)
    else:
        dist.recv(plan, partner)
    size, repetitions = plan.tolist()
    return 8 * size / median_seconds(lambda: send_and_confirm(size), repetitions) / 1e9


def measure_bandwidth(partner, device):
    """Returns the Gbit/s between this rank and rank `partner`, in the slower direction."""
    lower_rank_sends = dist.get_rank() < partner
    one = measure_direction(lower_rank_sends, partner, device)
    other = measure_direction(not lower_rank_sends, partner, device)
    return min(one, other)


def measure_bandwidths(device, local_rank, local_world_size):
    """Returns the Gbit/s between this rank and the one of the same local rank on other nodes."""
    node = dist.get_rank() // local_world_size
    bandwidths = {}
    for pairs in islice(rounds(dist.get_world_size() // local_world_size), MAX_PARTNERS):
        dist.barrier()
        for pair in pairs:
            if node in pair:
                partner = sum(pair) - node
                rank = partner * local_world_size + local_rank
                bandwidths[partner] = measure_bandwidth(rank, device)
    return bandwidths


def below_median(speeds, fraction):
    """Returns the nodes whose speed is less than this fraction of the median of all."""
    limit = fraction * statistics.median(speeds.values())
    return {node for node, speed in speeds.items() if speed < limit}


def report(results, local_world_size, device):
    """Prints a table of the nodes, and which are slow."""
    nodes = range(len(results) // local_world_size)
    hosts = {}
    matmul = {}
    network = {}
    for node in nodes:
        ranks = results[node * local_world_size : (node + 1) * local_world_size]
        hosts[node] = ranks[0]["host"]
        matmul[node] = min(rank["matmul"] for rank in ranks)
        links = defaultdict(float)  # to other nodes, of all ranks together
        for rank in ranks:
            for partner, bandwidth in rank["bandwidths"].items():
                links[partner] += bandwidth
        network[node] = max(links.values())
    slow_devices = below_median(matmul, SLOW[device.type])
    slow_networks = below_median(network, SLOW["network"])
    print(f"{'node':<16}{'slowest device':>18}{'network':>18}")
    for node in nodes:
        line = f"{hosts[node]:<16}{matmul[node]:>10.3g} TFLOP/s{network[node]:>11.3g} Gbit/s"
        if node in slow_devices:
            line += "  slow device"
        if node in slow_networks:
            line += "  slow network"
        print(line)
    slow = [hosts[node] for node in nodes if node in slow_devices | slow_networks]
    print(f"slow nodes: {', '.join(slow) or 'none'}")


def main():
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this script with a job file or torchrun, as its first lines show")
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["WORLD_SIZE"]) == local_world_size:
        sys.exit("there is only one node: start this script on two or more")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"{socket.gethostname()} has too few GPUs: lower --nproc_per_node")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # The measurement needs each message to wait for the one before (pytorch#156748).
    os.environ["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "false"
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
        dist.barrier()
        matmul = measure_matmul(device)
        bandwidths = measure_bandwidths(device, local_rank, local_world_size)
        results = [None] * dist.get_world_size()
        result = {"host": socket.gethostname(), "matmul": matmul, "bandwidths": bandwidths}
        dist.all_gather_object(results, result)
    except torch.OutOfMemoryError:
        sys.exit(f"{socket.gethostname()}: GPU {local_rank} has no free memory: is it in use?")
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"{socket.gethostname()} does not reach all other nodes: {reason}")
    if dist.get_rank() == 0:
        report(results, local_world_size, device)
    time.sleep(0.1)  # CPU only: gloo's threads finish before Python exits (pytorch#190489)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
