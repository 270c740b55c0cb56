"""Measures what distributed training costs on this machine; draws it, and prints tables: cost.py

Trains a small GPT in several placements on pocket clusters, whose links it limits, and on one to
four ranks of this machine. Fits bench/formula.py to two placements, and predicts the others. The
figures go into runs/cost/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from formula import all_reduce, step
from measure import bus_bandwidth
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from tools.pages.charts import draw  # noqa: E402

MEASURE = str(ROOT / "bench" / "measure.py")
OUT = ROOT / "runs" / "cost"
LINKS = {"no limit": None, "100 Mbit/s": 100e6 / 8, "20 Mbit/s": 20e6 / 8}  # bytes per second
PLACEMENTS = [(1, 4), (2, 2), (4, 1)]  # nodes, ranks per node
FITTED = [(1, 4, "no limit"), (4, 1, "100 Mbit/s")]
BUCKETS = 2  # that DDP makes of 3.3 MB: 1 MiB, and the rest
BATCH_SIZE = 24  # of the scaling runs: divisible by 1, 2, 3 and 4
SCALING_HEADS = [2, 4]


def run(command, arguments):
    """Runs measure.py by `command`; returns its figures."""
    result = OUT / "figures.json"
    result.unlink(missing_ok=True)
    command = [*command, MEASURE, *arguments.split(), "--json", str(result)]
    done = subprocess.run(command, cwd=OUT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return json.loads(result.read_text())


def on_this_machine(ranks):
    return ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]


def on_cluster(nodes, ranks, link):
    """Returns the command that runs torchrun on each node of a pocket cluster."""
    cluster = [str(ROOT / "slurm" / "pocket-cluster"), f"--nodes={nodes}", f"--gpus={ranks}"]
    if LINKS[link]:
        cluster.append(f"--bandwidth={link.split()[0]}mbit")
    srun = ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", f"--gpus-per-node={ranks}"]
    torchrun = ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={ranks}", "--rdzv_id=cost"]
    return cluster + srun + torchrun + ["--rdzv_backend=c10d", "--rdzv_endpoint=node1:29400"]


def cluster_problem():
    """Returns why there can be no pocket cluster here, or None."""
    command = [ROOT / "slurm" / "pocket-cluster", "-n", "1", "-b", "1gbit", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else None


def measure_all(with_cluster, rounds):
    """Returns the figures of each placement, of each number of ranks, and of a slow link."""
    places = [
        (nodes, ranks, link)
        for nodes, ranks in PLACEMENTS
        for link in (LINKS if nodes > 1 else ["no limit"])
    ]
    if not with_cluster:
        places = []
    placements = {place: [] for place in places}
    scaling = {}
    with tqdm(total=4 + rounds * len(places) + with_cluster, unit="run", disable=None) as progress:
        for ranks in range(1, 5):
            heads = " ".join(map(str, SCALING_HEADS))
            arguments = f"--n_head {heads} --batch_size {BATCH_SIZE} {BATCH_SIZE // ranks}"
            trace = " --trace trace.json" if ranks == 2 else ""
            scaling[ranks] = run(on_this_machine(ranks), f"{arguments} --repetitions 5{trace}")
            progress.update()
        for _ in range(rounds):
            for place in places:
                sizes = "--sizes 1024 16384 262144 1048576"
                placements[place].append(run(on_cluster(*place), f"{sizes} --repetitions 3"))
                progress.update()
        slow = None
        if with_cluster:
            trace = "--trace trace_slow_link.json"
            slow = run(
                on_cluster(2, 1, "100 Mbit/s"), f"--batch_size {BATCH_SIZE} --sizes 1024 {trace}"
            )
            progress.update()
    return placements, scaling, slow


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
    latency = median_all_reduce(far, "1024") / hops
    largest = 1048576
    seconds = median_all_reduce(far, str(largest)) - median_all_reduce(far, "1024")
    share = bus_bandwidth(largest, seconds, 4) / LINKS["100 Mbit/s"]  # of the link's bandwidth

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
    print("\nAll-reduce between 4 ranks       1 KiB, latency     1 MiB, bus bandwidth")
    for place, runs in placements.items():
        latency = median_all_reduce(runs, "1024")
        bandwidth = bus_bandwidth(2**20, median_all_reduce(runs, "1048576"), 4) * 8 / 1e6
        print(f"{name(place):<32}{latency * 1e3:>12.1f} ms{bandwidth:>17,.0f} Mbit/s")


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


def scaling_rows(scaling):
    """Yields for each model and kind of scaling its name and the efficiency on 1 to 4 ranks."""
    for model in range(len(SCALING_HEADS)):
        size = scaling[1]["trainings"][2 * model]["gradient_bytes"] // 4
        for kind, label in enumerate(("weak", "strong")):
            seconds = [scaling[n]["trainings"][2 * model + kind]["step"] for n in scaling]
            work = [1 if label == "weak" else 1 / n for n in scaling]
            yield (
                f"{size / 1e6:.1f} M parameters, {label}",
                [w * seconds[0] / s for w, s in zip(work, seconds, strict=True)],
                [n * w * BATCH_SIZE / s for n, w, s in zip(scaling, work, seconds, strict=True)],
            )


def print_scaling(scaling):
    print(f"\nSamples per second (efficiency), {os.cpu_count()} CPU cores")
    print(f"{'ranks':<28}" + "".join(f"{ranks:>14}" for ranks in scaling))
    for label, efficiencies, samples in scaling_rows(scaling):
        cells = [f"{s:.0f} ({e:.0%})" for e, s in zip(efficiencies, samples, strict=True)]
        print(f"{label:<28}" + "".join(f"{cell:>14}" for cell in cells))


def print_phases(scaling, slow):
    columns = {"this machine": scaling[2]["phases"]}
    if slow:
        columns["100 Mbit/s"] = slow["phases"]
    print("\nA step of 2 ranks, in ms" + "".join(f"{title:>14}" for title in columns))
    for phase in scaling[2]["phases"]:
        cells = "".join(f"{phases[phase]:>14.1f}" for phases in columns.values())
        print(f"{phase:<24}{cells}")


def draw_network(placements):
    bandwidths = {
        name(place): [
            (int(size), bus_bandwidth(int(size), median_all_reduce(runs, size), 4) * 8 / 1e6)
            for size in runs[0]["all_reduce"]
        ]
        for place, runs in placements.items()
        if place[0] in (1, 4)
    }
    draw("cost_network", bandwidths, OUT)


def draw_placements(placements, predict):
    steps = {
        f"{nodes} x {ranks}": [
            median_step(placements[nodes, ranks, link if nodes > 1 else "no limit"])
            for link in LINKS
        ]
        for nodes, ranks in PLACEMENTS
    }
    formula = [predict(link) for link in LINKS]
    draw("cost_placement", {"links": list(LINKS), "steps": steps, "formula": formula}, OUT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of the placements")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    OUT.mkdir(parents=True, exist_ok=True)
    problem = cluster_problem()
    if problem:
        print(f"Without a cluster, only this machine is measured. {problem}")
    placements, scaling, slow = measure_all(not problem, args.rounds)
    print_scaling(scaling)
    print_phases(scaling, slow)
    draw("cost_clusters", None, OUT)
    if placements:
        print_network(placements)
        predict = fit(placements)
        print_placements(placements, predict)
        draw_network(placements)
        draw_placements(placements, predict)
    print(f"\nFigures and traces are in {OUT.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
