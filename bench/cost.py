"""Measures what distributed training costs on this machine: python -m bench.cost

Trains a small GPT in several placements on pocket clusters, whose links it limits, and on one to
four ranks of this machine. Fits the formula of tools/formulas/scaling.py to two placements, and
predicts the others. Prints tables.
"""

import argparse
import json
import os
import statistics
import tempfile

from tqdm import tqdm

from bench.launch import output_of, run
from bench.measure import bus_bandwidth
from tools.formulas.scaling import all_reduce, step

LINKS = {"no limit": None, "100 Mbit/s": 100e6 / 8, "20 Mbit/s": 20e6 / 8}  # bytes per second
PLACEMENTS = [(1, 4), (2, 2), (4, 1)]  # nodes, ranks per node
FITTED = [(1, 4, "no limit"), (4, 1, "100 Mbit/s")]
SMALLEST, LARGEST = "1024", "1048576"  # of the sizes of all-reduces, in bytes
BUCKETS = 2  # that DDP makes of 3.3 MB: 1 MiB, and the rest
BATCH_SIZE = 24  # of the scaling runs: divisible by 1, 2, 3 and 4
SCALING_HEADS = [2, 4]


def measure(torchrun, arguments):
    """Returns the figures of bench/measure.py, run by `torchrun`."""
    with tempfile.NamedTemporaryFile() as figures:
        output_of(f"{torchrun} -m bench.measure --json {figures.name} {arguments}")
        return json.load(figures)


def on_cluster(nodes, ranks, link):
    """Returns the command that runs torchrun on each node of a pocket cluster."""
    cluster = f"slurm/pocket-cluster -n {nodes} -g {ranks}"
    if LINKS[link]:
        cluster += f" -b {link.split()[0]}mbit"
    return f"{cluster} srun -N {nodes} --gpus-per-node={ranks} slurm/torchrun_script.sh"


def measure_scaling():
    """Returns the figures of one to four ranks of this machine."""
    heads = " ".join(map(str, SCALING_HEADS))
    scaling = {}
    for ranks in tqdm(range(1, 5), desc="ranks", disable=None):
        arguments = f"--n_head {heads} --batch_size {BATCH_SIZE} {BATCH_SIZE // ranks}"
        torchrun = f"torchrun --standalone --nproc_per_node={ranks}"
        scaling[ranks] = measure(torchrun, f"{arguments} --repetitions 5")
    return scaling


def measure_placements(rounds):
    """Returns the figures of each placement with each kind of link, of all rounds."""
    placements = {
        (nodes, ranks, link): []
        for nodes, ranks in PLACEMENTS
        for link in (LINKS if nodes > 1 else ["no limit"])
    }
    for place in tqdm([*placements] * rounds, desc="placements", disable=None):
        placements[place].append(measure(on_cluster(*place), "--repetitions 3"))
    return placements


def median_step(runs):
    return statistics.median(figures["trainings"][0]["step"] for figures in runs)


def median_all_reduce(runs, size):
    return statistics.median(figures["all_reduce"][size] for figures in runs)


def fit(placements):
    """Returns a function that predicts the step of a placement, fitted to two of them."""
    near, far = (placements[place] for place in FITTED)
    size = far[0]["trainings"][0]["gradient_bytes"]
    computation = median_step(near)
    hops = 2 * (4 - 1)
    latency = median_all_reduce(far, SMALLEST) / hops
    seconds = median_all_reduce(far, LARGEST) - median_all_reduce(far, SMALLEST)
    share = bus_bandwidth(int(LARGEST), seconds, 4) / LINKS["100 Mbit/s"]  # of the link's bandwidth

    def communication(link):
        if LINKS[link] is None:
            return 0.0  # within the computation, which is measured with it
        return all_reduce(4, size, latency, share * LINKS[link], BUCKETS)

    hidden = computation + communication("100 Mbit/s") - median_step(far)
    overlap = max(0.0, hidden / computation)
    print(
        f"\nFitted: computation {computation * 1e3:.0f} ms, latency {latency * 1e3:.2f} ms, "
        f"{share:.0%} of the link's bandwidth, overlap {overlap:.2f}"
    )
    return lambda link: step(computation, communication(link), overlap)


def print_network(placements):
    sizes = placements[FITTED[0]][0]["all_reduce"]
    print("\nBus bandwidth between 4 ranks, Mbit/s (ms of an all-reduce), by its bytes")
    print(" " * 20 + "".join(f"{int(size):>18,}" for size in sizes))
    for place, runs in placements.items():
        line = f"{name(place):<20}"
        for size in sizes:
            seconds = median_all_reduce(runs, size)
            bandwidth = bus_bandwidth(int(size), seconds, 4) * 8 / 1e6
            line += f"{bandwidth:,.1f} ({seconds * 1e3:.1f})".rjust(18)
        print(line)


def name(place):
    nodes, ranks, link = place
    return f"{nodes} x {ranks}, {link}" if nodes > 1 else f"{nodes} x {ranks}"


def print_placements(placements, predict):
    print("\nNodes x ranks, links          step    of 1 x 4 (all rounds)     formula")
    for place, runs in placements.items():
        ratios = [
            median_step([run]) / median_step([near])
            for run, near in zip(runs, placements[FITTED[0]], strict=True)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        seconds = median_step(runs)
        predicted = predict(place[2])
        error = "fitted" if place in FITTED else f"{predicted / seconds - 1:+.0%}"
        measured = f"{name(place):<24}{seconds * 1e3:>7.0f} ms{ratio:>24}"
        print(f"{measured}{predicted * 1e3:>8.0f} ms {error}")


def print_scaling(scaling):
    """Each model is trained with BATCH_SIZE samples per rank, then with as many in all."""
    print(f"\nSamples per second (efficiency), {os.cpu_count()} CPU cores")
    print(f"{'ranks':<28}" + "".join(f"{ranks:>14}" for ranks in scaling))
    for row, on_one_rank in enumerate(scaling[1]["trainings"]):
        kind = ("weak", "strong")[row % 2]
        line = f"{on_one_rank['gradient_bytes'] / 4e6:.1f} M parameters, {kind}".ljust(28)
        for ranks, figures in scaling.items():
            samples = BATCH_SIZE * (ranks if kind == "weak" else 1)
            speed = samples / figures["trainings"][row]["step"]
            efficiency = speed / ranks / (BATCH_SIZE / on_one_rank["step"])
            line += f"{speed:.0f} ({efficiency:.0%})".rjust(14)
        print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of the placements")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    scaling = measure_scaling()
    status, problem = run("slurm/pocket-cluster -n 1 -b 1gbit true")
    if status == 0:
        placements = measure_placements(args.rounds)
    print_scaling(scaling)
    if status == 0:
        print_network(placements)
        predict = fit(placements)
        print_placements(placements, predict)
    else:
        print(f"\nWithout a cluster, only this machine is measured. {problem.strip()}")


if __name__ == "__main__":
    main()
