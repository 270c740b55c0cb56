"""docs/cost.md: measures what distributed training costs on this machine

Trains a small GPT in several placements on pocket clusters, whose links it limits. Fits the formula
of tools/formulas/scaling.py to two placements, and predicts the others. Prints tables.
"""

import json
import statistics
import sys
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


def measure(nodes, ranks, link):
    """Returns the figures of bench/measure.py, run by torchrun on each node of a pocket cluster."""
    cluster = f"slurm/pocket-cluster -n {nodes} -g {ranks}"
    if LINKS[link]:
        cluster += f" -b {link.split()[0]}mbit"
    torchrun = f"srun -N {nodes} --gpus-per-node={ranks} slurm/torchrun_script.sh"
    with tempfile.NamedTemporaryFile() as figures:
        output_of(f"{cluster} {torchrun} -m bench.measure --json {figures.name} --repetitions 3")
        return json.load(figures)


def measure_placements(rounds):
    """Returns the figures of each placement with each kind of link, of all rounds."""
    placements = {
        (nodes, ranks, link): []
        for nodes, ranks in PLACEMENTS
        for link in (LINKS if nodes > 1 else ["no limit"])
    }
    for place in tqdm([*placements] * rounds, desc="placements", disable=None):
        placements[place].append(measure(*place))
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


def print_table(title, *rows):
    """Prints rows of texts, with their columns below one another."""
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))


def name(place):
    nodes, ranks, link = place
    return f"{nodes} x {ranks}, {link}" if nodes > 1 else f"{nodes} x {ranks}"


def network_rows(placements):
    sizes = placements[FITTED[0]][0]["all_reduce"]
    yield ["", *(f"{int(size):,}" for size in sizes)]
    for place, runs in placements.items():
        seconds = {size: median_all_reduce(runs, size) for size in sizes}
        bandwidths = [bus_bandwidth(int(size), s, 4) * 8 / 1e6 for size, s in seconds.items()]
        milliseconds = [s * 1e3 for s in seconds.values()]
        cells = zip(bandwidths, milliseconds, strict=True)
        yield [name(place), *("{:,.1f} ({:.1f})".format(*cell) for cell in cells)]


def placement_rows(placements, predict):
    yield ["Nodes x ranks, links", "step", "of 1 x 4 (all rounds)", "formula", "error"]
    for place, runs in placements.items():
        ratios = [
            median_step([run]) / median_step([near])
            for run, near in zip(runs, placements[FITTED[0]], strict=True)
        ]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        seconds, predicted = median_step(runs), predict(place[2])
        error = "fitted" if place in FITTED else f"{predicted / seconds - 1:+.0%}"
        times = [f"{s * 1e3:.0f} ms" for s in (seconds, predicted)]
        yield [name(place), times[0], ratio, times[1], error]


def report(rounds=3):
    status, problem = run("slurm/pocket-cluster -n 1 -b 1gbit true")
    if status != 0:
        sys.exit(f"It needs the pocket cluster. {problem.strip()}")
    placements = measure_placements(rounds)
    title = "Bus bandwidth between 4 ranks, Mbit/s (ms of an all-reduce), by its bytes"
    print_table(title, *network_rows(placements))
    print_table("Times of a step", *placement_rows(placements, fit(placements)))
