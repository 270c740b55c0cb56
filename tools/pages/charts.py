"""Draws what runs measured, from measured.json, into docs/assets/: charts.py

`make run`, `make cost` and bench/recovery_time.py draw what they measure into runs/ with the same
functions, and write the figures beside it, as JSON. To show those, copy them into measured.json.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

from picture import Picture, scale

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))
from formula import ETHERNET, H100, efficiency  # noqa: E402

EPOCH_SIZE = 2048  # samples
LEFT, RIGHT = 52, 388


def draw(name, data, folder):
    """Draws one of CHARTS, and writes its data beside it."""
    picture = CHARTS[name](data)
    picture.save(folder / f"{name}.svg")
    (folder / f"{name}.json").write_text(json.dumps(data))


def read_elastic(log, plain_log):
    """Returns the losses by epoch of both runs, and the first epoch and size of each world."""
    losses, worlds = read_log(log)
    return {"undisturbed": read_log(plain_log)[0], "losses": losses, "worlds": worlds}


def read_log(log):
    losses, worlds = [], []
    world_size = None
    for line in log.splitlines():
        if found := re.search(r"rank 0 of (\d+) starts", line):
            world_size = int(found[1])
        elif found := re.search(r"epoch (\d+) \+ (\d+) samples \| loss (\S+) \| saved", line):
            epochs = int(found[1]) + int(found[2]) / EPOCH_SIZE
            if world_size:  # a world's first snapshot tells where it starts
                worlds.append((epochs, world_size))
                world_size = None
            # That of a snapshot within an epoch is the mean of the epoch so far.
            if epochs.is_integer() and epochs > (losses[-1][0] if losses else 0):
                losses.append((epochs, float(found[3])))
    return losses, worlds


def elastic_ddp(data):
    """The loss of an elastic run over that of an undisturbed one, and its world size."""
    picture = Picture(400, 340, "Loss by epoch with and without a failure, and the world size")
    losses, worlds = data["losses"], data["worlds"]
    last_epoch = losses[-1][0]
    epochs = scale(0, last_epoch, LEFT, RIGHT)
    values = [loss for _, loss in data["undisturbed"] + losses]
    loss = scale(min(values), max(values), 210, 34, log=True)
    powers = [10.0**n for n in range(-9, 9) if min(values) <= 10.0**n <= max(values)]
    picture.y_axis(LEFT, 26, 218, [(loss(power), f"{power:g}") for power in powers], "loss")
    picture.line([(epochs(x), loss(y)) for x, y in data["undisturbed"]], "b wide")
    picture.line([(epochs(x), loss(y)) for x, y in losses], "a line")
    sizes = [size for _, size in worlds]
    size_y = scale(0, max(sizes), 298, 254)
    marks = [(size_y(size), size) for size in range(max(sizes) + 1)]
    picture.y_axis(LEFT, 248, 298, marks, "world size")
    for (start, size), (end, _) in pairwise([*worlds, (last_epoch, 0)]):
        picture.line([(epochs(start), size_y(size)), (epochs(end), size_y(size))], "a line")
    for (_, before), (epoch, after) in pairwise(worlds):
        if after < before:
            picture.path(f"M{epochs(epoch):.1f} 26V218m0 30V298", "e dashed")
    ticks = range(0, int(last_epoch) + 1, max(1, int(last_epoch) // 5))
    picture.x_axis(298, LEFT, RIGHT, [(epochs(epoch), epoch) for epoch in ticks], "epochs")
    looks = {"b wide": "undisturbed", "a line": "elastic_ddp.py", "e dashed": "a node fails"}
    picture.legend(230, 40, looks.items())
    return picture


def cost_network(bandwidths):
    """The bus bandwidth of each placement, by the size of the tensor."""
    picture = Picture(400, 290, "Bus bandwidth by the size of the tensor")
    sizes = {1024: "1 KiB", 16384: "16 KiB", 262144: "256 KiB", 1048576: "1 MiB"}
    values = [mbits for by_size in bandwidths.values() for mbits in by_size.values()]
    size_x = scale(1024, 1048576, LEFT + 14, RIGHT - 20, log=True)
    mbits_y = scale(1, max(1000, *values), 246, 34, log=True)
    marks = [(mbits_y(mbits), f"{mbits:,}") for mbits in (1, 10, 100, 1000)]
    picture.y_axis(LEFT, 26, 246, marks, "bus bandwidth, Mbit/s")
    marks = [(size_x(size), label) for size, label in sizes.items()]
    picture.x_axis(246, LEFT, RIGHT, marks, "size of the tensor")
    for look, by_size in zip("abec", bandwidths.values(), strict=True):
        points = [(size_x(int(size)), mbits_y(mbits)) for size, mbits in by_size.items()]
        picture.line(points, f"{look} line")
        picture.dots(points, f"{look} dots")
    looks = zip(("a line", "b line", "e line", "c line"), bandwidths, strict=True)
    picture.legend(LEFT + 18, 40, looks)
    return picture


def cost_placement(data):
    """The seconds of a step in each placement, measured and by the formula, for each link."""
    picture = Picture(400, 290, "Seconds per step of three placements, by link")
    longest = max(max(seconds) for seconds in data["steps"].values())
    seconds_y = scale(0, longest, 264, 34)
    marks = [(seconds_y(half / 2), half / 2) for half in range(int(2 * longest) + 1)]
    picture.y_axis(LEFT, 26, 264, marks, "seconds per step")
    marks = []
    for column, link in enumerate(data["links"]):
        left = LEFT + 14 + 112 * column
        marks.append((left + 47, link))
        for place, seconds in enumerate(data["steps"].values()):
            top = seconds_y(seconds[column])
            picture.box(left + 32 * place, top, 30, 264 - top, "abc"[place])
        y = seconds_y(data["formula"][column])
        picture.line([(left + 28, y), (left + 98, y)], "e line dashed")
    picture.x_axis(264, LEFT, RIGHT, marks, "")
    for row, (name, look) in enumerate(zip(data["steps"], "abc", strict=True)):
        picture.box(LEFT + 18, 34 + 24 * row, 26, 14, look)
        picture.text(LEFT + 52, 45.5 + 24 * row, name)
    picture.legend(LEFT + 18, 113, [("e line dashed", "formula")])
    return picture


def cost_scaling(speedups):
    """The speed-up on more ranks of each model, with the batch per rank or of all kept."""
    picture = Picture(400, 290, "Speed-up by the number of ranks")
    ranks_x, speedup_y = scale(1, 4, LEFT + 14, RIGHT), scale(0, 4, 246, 34)
    picture.y_axis(LEFT, 26, 246, [(speedup_y(n), n) for n in range(5)], "speed-up")
    picture.x_axis(246, LEFT, RIGHT, [(ranks_x(n), n) for n in range(1, 5)], "ranks")
    picture.line([(ranks_x(n), speedup_y(n)) for n in (1, 4)], "dashed")
    for look, values in zip("abcd", speedups.values(), strict=True):
        points = [(ranks_x(n), speedup_y(value)) for n, value in enumerate(values, 1)]
        picture.line(points, f"{look} line")
    looks = zip(("a line", "b line", "c line", "d line"), speedups, strict=True)
    picture.legend(LEFT + 18, 40, [("dashed", "ideal"), *looks])
    return picture


def cost_clusters(_):
    """The efficiency of large clusters, by bench/formula.py."""
    picture = Picture(400, 320, "Efficiency by the number of GPUs")
    gpus = [2**n for n in range(3, 15)]
    gpus_x, share_y = scale(gpus[0], gpus[-1], LEFT + 10, RIGHT, log=True), scale(0, 1, 210, 34)
    marks = [(share_y(share / 5), f"{share * 20} %") for share in range(6)]
    picture.y_axis(LEFT, 26, 210, marks, "efficiency")
    picture.x_axis(210, LEFT, RIGHT, [(gpus_x(n), f"{n:,}") for n in gpus[::3]], "GPUs")
    clusters = [("HSDP", H100, ""), ("FSDP", H100, " dotted"), ("HSDP", ETHERNET, " dashed")]
    for sharding, hardware, style in clusters:
        for tokens, look in ((1e6, "b"), (4e6, "a"), (16e6, "e")):
            shares = [efficiency(hardware, n, 8e9, tokens, sharding == "HSDP") for n in gpus]
            points = [(gpus_x(n), share_y(y)) for n, y in zip(gpus, shares, strict=True)]
            picture.line(points, f"{look} line{style}")
    names = [f"{sharding}, {hardware.name}" for sharding, hardware, _ in clusters]
    looks = ["line", "line dotted", "line dashed"]
    picture.legend(4, 268, zip(looks, names, strict=True))
    tokens = {"b line": "1 M tokens", "a line": "4 M tokens", "e line": "16 M tokens"}
    picture.legend(276, 268, tokens.items())
    return picture


def recovery(medians):
    """The phases of each way to recover on a time axis, which begins with the kill."""
    picture = Picture(400, 202, "What happens after a kill, in seconds")
    looks = dict(zip(next(iter(medians.values())), "dbca", strict=True))
    longest = max(sum(phases.values()) for phases in medians.values())
    seconds_x = scale(0, longest, 150, 356)
    for row, (way, phases) in enumerate(medians.items()):
        top = 6 + 30 * row
        picture.text(4, top + 16, way)
        elapsed = 0
        for phase, seconds in phases.items():
            left = seconds_x(elapsed)
            elapsed += seconds
            picture.box(left, top, seconds_x(elapsed) - left, 22, looks[phase])
        picture.text(seconds_x(elapsed) + 6, top + 16, f"{elapsed:.2g}")
    marks = [(seconds_x(second), second) for second in range(0, int(longest) + 1, 10)]
    picture.x_axis(104, 150, 392, marks, "seconds since the kill")
    for place, (phase, look) in enumerate(looks.items()):
        row, column = divmod(place, 2)
        picture.box(4 + 200 * column, 154 + 24 * row, 18, 18, look)
        picture.text(30 + 200 * column, 168 + 24 * row, phase)
    return picture


CHARTS = {
    "elastic_ddp": elastic_ddp,
    "cost_network": cost_network,
    "cost_placement": cost_placement,
    "cost_scaling": cost_scaling,
    "cost_clusters": cost_clusters,
    "recovery": recovery,
}


def main():
    measured = json.loads(Path(__file__).with_name("measured.json").read_text())
    folder = Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs" / "assets")
    for name, data in measured.items():
        CHARTS[name](data).save(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
