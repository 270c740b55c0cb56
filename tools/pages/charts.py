"""Draws what runs measured, from measured.json, into docs/assets/: charts.py

`make run`, bench/cost.py and bench/recovery_time.py draw what they measure into runs/ with the same
functions, and write the figures beside it, as JSON. To show those, copy them into measured.json.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

from bench.scaling import ETHERNET, H100, efficiency
from tools.pages.picture import Picture, Scale, assets_folder

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
    picture = Picture(400, 336, "Loss by epoch with and without a failure, and the world size")
    losses = data["losses"]
    highest = losses[0][1]
    last_epoch, lowest = losses[-1]
    epoch_x = Scale(0, last_epoch, LEFT, RIGHT)
    loss_y = Scale(lowest, highest, 210, 28, log=True)
    powers = [10.0**n for n in range(-9, 9) if lowest <= 10.0**n <= highest]
    picture.y_axis(loss_y, LEFT, {power: f"{power:g}" for power in powers}, "loss")
    picture.curve(epoch_x, loss_y, data["undisturbed"], "b line wide")
    picture.curve(epoch_x, loss_y, losses, "a line")
    picture.legend(230, 40, {"b line wide": "undisturbed", "a line": "elastic_ddp.py"})
    draw_worlds(picture, epoch_x, [*data["worlds"], (last_epoch, data["worlds"][-1][1])])
    epochs = range(0, int(last_epoch) + 1, max(1, int(last_epoch) // 5))
    picture.x_axis(epoch_x, 294, {epoch: epoch for epoch in epochs}, "epochs")
    return picture


def draw_worlds(picture, epoch_x, worlds):
    size_y = Scale(0, 3, 294, 246)
    picture.y_axis(size_y, LEFT, {size: size for size in range(4)}, "world size")
    for (start, size), (end, next_size) in pairwise(worlds):
        picture.curve(epoch_x, size_y, [(start, size), (end, size)], "a line")
        if next_size < size:
            picture.path(f"M{epoch_x(end):.1f} 28V210m0 36V294", "e dashed line")
            picture.legend(230, 80, {"e dashed line": "a node fails"})


def cost_network(bandwidths):
    """The bus bandwidth of each placement, by the size of the tensor."""
    picture = Picture(400, 286, "Bus bandwidth by the size of the tensor")
    size_x = Scale(2**10, 2**20, LEFT, 376, log=True)
    mbits_y = Scale(1, max(1000, *dict(bandwidths["1 x 4"]).values()), 244, 28, log=True)
    powers = {power: f"{power:,}" for power in (1, 10, 100, 1000)}
    picture.y_axis(mbits_y, LEFT, powers, "bus bandwidth, Mbit/s")
    sizes = {2**10: "1 KiB", 2**14: "16 KiB", 2**18: "256 KiB", 2**20: "1 MiB"}
    picture.x_axis(size_x, 244, sizes, "size of the tensor")
    looks = dict(zip(("a line", "b line", "e line", "c line"), bandwidths, strict=True))
    for look, place in looks.items():
        picture.curve(size_x, mbits_y, bandwidths[place], look)
    picture.legend(LEFT + 22, 40, looks)
    return picture


def cost_placement(data):
    """The seconds of a step in each placement, measured and by the formula, for each link."""
    picture = Picture(400, 286, "Seconds per step of three placements, by link")
    longest = max(max(seconds) for seconds in [*data["steps"].values(), data["formula"]])
    seconds_y = Scale(0, longest, 260, 28)
    marks = [half / 2 for half in range(int(2 * longest) + 1)]
    picture.y_axis(seconds_y, LEFT, {mark: mark for mark in marks}, "seconds per step")
    link_x = Scale(-0.5, 2.5, LEFT, RIGHT)
    picture.x_axis(link_x, 260, dict(enumerate(data["links"])), "")
    looks = dict(zip("abc", data["steps"], strict=True))
    for column, predicted in enumerate(data["formula"]):
        for bar, (look, place) in enumerate(looks.items()):
            top = seconds_y(data["steps"][place][column])
            picture.box(link_x(column) - 47 + 32 * bar, top, 30, 260 - top, look)
        # Only the two placements on several nodes have links.
        picture.path(f"M{link_x(column) - 19:.1f} {seconds_y(predicted):.1f}h70", "e dashed line")
    picture.legend(LEFT + 22, 40, looks | {"e dashed line": "formula"})
    return picture


def cost_clusters(_):
    """The efficiency of large clusters, by bench/scaling.py."""
    picture = Picture(400, 316, "Efficiency by the number of GPUs")
    gpus = [2**n for n in range(3, 15)]
    gpus_x, share_y = Scale(8, 2**14, LEFT, RIGHT, log=True), Scale(0, 1, 206, 28)
    percents = {percent / 100: f"{percent} %" for percent in range(0, 101, 20)}
    picture.y_axis(share_y, LEFT, percents, "efficiency")
    picture.x_axis(gpus_x, 206, {n: f"{n:,}" for n in gpus[::3]}, "GPUs")
    clusters = {"": ("HSDP", H100), " dotted": ("FSDP", H100), " dashed": ("HSDP", ETHERNET)}
    tokens = {"b line": 1, "a line": 4, "e line": 16}
    for style, (sharding, hardware) in clusters.items():
        for look, millions in tokens.items():
            hsdp = sharding == "HSDP"
            shares = [(n, efficiency(hardware, n, 8e9, 1e6 * millions, hsdp)) for n in gpus]
            picture.curve(gpus_x, share_y, shares, look + style)
    names = {f"line{style}": f"{name}, {link.name}" for style, (name, link) in clusters.items()}
    picture.legend(8, 264, names)
    picture.legend(280, 264, {look: f"{millions} M tokens" for look, millions in tokens.items()})
    return picture


def recovery(medians):
    """The phases of each way to recover on a time axis, which begins with the kill."""
    picture = Picture(400, 202, "What happens after a kill, in seconds")
    looks = dict(zip(next(iter(medians.values())), "dbca", strict=True))
    longest = max(sum(phases.values()) for phases in medians.values())
    second_x = Scale(0, longest, 150, 356)
    draw_stacked_bars(picture, second_x, medians, looks, "{:.2g}")
    seconds = range(0, int(longest) + 1, 10)
    picture.x_axis(second_x, 104, {second: second for second in seconds}, "seconds since the kill")
    names = {look: phase for phase, look in looks.items()}
    picture.legend(4, 166, {look: names[look] for look in "dc"})
    picture.legend(204, 166, {look: names[look] for look in "ba"})
    return picture


def draw_stacked_bars(picture, scale, rows, looks, total_format):
    """Draws a bar for each row, of one box for each of its parts, and the sum of the parts."""
    for row, (name, parts) in enumerate(rows.items()):
        top = 6 + 30 * row
        picture.text(4, top + 16, name)
        total = 0
        for part, size in parts.items():
            left = scale(total)
            total += size
            picture.box(left, top, scale(total) - left, 22, looks[part])
        picture.text(scale(total) + 6, top + 16, total_format.format(total))


def overlap(forms):
    """When the all-reduces of by_hand/ddp.py run in a step, beside the backward pass, by form."""
    picture = Picture(400, 330, "When each all-reduce runs, in three forms of DDP by hand")
    ends = [end for spans in forms.values() for part in spans.values() for _, end in part]
    ms_x = Scale(0, 1e3 * max(ends), 82, 392)
    for row, (form, spans) in enumerate(forms.items()):
        top = 22 + 84 * row
        picture.text(4, top - 8, form)
        for line, (part, look) in enumerate({"backward": "a", "all-reduce": "b"}.items()):
            y = top + 26 * line
            picture.text(4, y + 15, part)
            previous_end = 0
            for start, end in sorted(spans[part]):
                left = ms_x(1e3 * max(start, previous_end))  # until then, it waits for its turn
                previous_end = max(end, previous_end)
                picture.box(left, y, ms_x(1e3 * previous_end) - left, 20, look)
    marks = {ms: ms for ms in range(0, int(1e3 * max(ends)) + 1, 100)}
    picture.x_axis(ms_x, 278, marks, "milliseconds of backward() and what follows")
    return picture


def by_hand_memory(scripts):
    """What a rank of four holds with each script of by_hand/, in MB."""
    picture = Picture(400, 196, "What a rank of four holds, in MB")
    mb_x = Scale(0, max(sum(parts.values()) for parts in scripts.values()), 70, 356)
    looks = dict(zip(next(iter(scripts.values())), "abc", strict=True))
    draw_stacked_bars(picture, mb_x, scripts, looks, "{:.0f}")
    picture.x_axis(mb_x, 104, {mb: mb for mb in range(0, 301, 100)}, "MB")
    picture.legend(8, 176, {look: part for part, look in looks.items()}, across=130)
    return picture


DRAWN = [elastic_ddp, cost_network, cost_placement, cost_clusters, recovery]
DRAWN += [overlap, by_hand_memory]
CHARTS = {chart.__name__: chart for chart in DRAWN}


def main():
    measured = json.loads(Path(__file__).with_name("measured.json").read_text())
    for name, data in measured.items():
        CHARTS[name](data).save(assets_folder() / f"{name}.svg")


if __name__ == "__main__":
    main()
