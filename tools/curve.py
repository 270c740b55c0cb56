"""Draws the loss of an elastic run over that of an undisturbed one, and its world size, as SVG."""

import itertools
import math
import re

SIZE = 2048  # samples of an epoch
WIDTH, LEFT, RIGHT = 720, 56, 704
LOSS, WORLD, HEIGHT = (20, 230), (270, 330), 374  # top and bottom of each panel; of the picture
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
line { stroke: #d1d9e0 }
polyline { fill: none; stroke-linejoin: round }
.plain { stroke: #d4a72c; stroke-width: 6 } text.plain { stroke: none; fill: #7d4e00 }
.run { stroke: #0550ae; stroke-width: 1.5 } text.run { stroke: none; fill: #0550ae }
line.kill { stroke: #b1103c; stroke-dasharray: 4 3 } text.kill { fill: #b1103c }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } line { stroke: #3d444d }
  .plain { stroke: #9e6a03 } text.plain { fill: #e3b341 }
  .run { stroke: #79c0ff } text.run { fill: #79c0ff }
  line.kill { stroke: #ff8fa3 } text.kill { fill: #ff8fa3 }
}"""


def parse(log):
    """Returns a log's points (epochs, loss), and its worlds (epochs at their start, ranks)."""
    points, worlds, ranks = [(0.0, 0.0)], [], None
    for line in log.splitlines():
        if found := re.search(r"rank 0 of (\d+) starts", line):
            ranks = int(found[1])
        elif found := re.search(r"epoch (\d+) \+ (\d+) samples \| loss (\S+) \| saved", line):
            epoch = int(found[1]) + int(found[2]) / SIZE
            if ranks:  # a world's first snapshot tells where it begins
                worlds.append((epoch, ranks))
                ranks = None
            if epoch > points[-1][0]:
                points.append((epoch, float(found[3])))
    return points[1:], worlds


def draw(log, plain_log):
    points, worlds = parse(log)
    plain, _ = parse(plain_log)
    end = points[-1][0]
    low = math.floor(math.log10(min(loss for _, loss in points + plain)))
    high = math.ceil(math.log10(max(loss for _, loss in points + plain)))
    most = max(ranks for _, ranks in worlds)

    def x(epoch):
        return round(LEFT + (RIGHT - LEFT) * epoch / end, 1)

    def y(share, panel):
        return round(panel[1] - (panel[1] - panel[0]) * share, 1)

    def loss_line(kind, points):
        where = (f"{x(e)},{y((math.log10(v) - low) / (high - low), LOSS)}" for e, v in points)
        return f'<polyline class="{kind}" points="{" ".join(where)}"/>'

    def tick(label, height):
        return (
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>'
            f'<text x="{LEFT - 8}" y="{height + 4}" text-anchor="end">{label}</text>'
        )

    steps = [
        f"{x(epoch)},{y(ranks / most, WORLD)}"
        for (start, ranks), (stop, _) in zip(worlds, [*worlds[1:], (end, 0)], strict=True)
        for epoch in (start, stop)
    ]
    losses = [tick(f"{10.0**p:g}", y((p - low) / (high - low), LOSS)) for p in range(low, high + 1)]
    sizes = [tick(size, y(size / most, WORLD)) for size in range(most + 1)]
    kills = [
        f'<line class="kill" x1="{x(e)}" x2="{x(e)}" y1="{LOSS[0]}" y2="{WORLD[1]}"/>'
        f'<text class="kill" x="{x(e) + 6}" y="{LOSS[0] + 14}">a node dies</text>'
        for (_, before), (e, after) in itertools.pairwise(worlds)
        if after < before
    ]
    epochs = [
        f'<text x="{x(n)}" y="{WORLD[1] + 18}" text-anchor="middle">{n}</text>'
        for n in range(0, int(end) + 1, max(1, round(end / 10)))
    ]
    legend = (
        f'<text class="plain" x="{RIGHT}" y="{LOSS[0] + 34}" text-anchor="end">undisturbed</text>'
        f'<text class="run" x="{RIGHT}" y="{LOSS[0] + 54}" text-anchor="end">elastic_ddp.py</text>'
        f'<text x="{LEFT}" y="{LOSS[0] - 8}">loss</text>'
        f'<text x="{LEFT}" y="{WORLD[0] - 10}">world size</text>'
        f'<text x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">epochs</text>'
    )
    title = (
        f"Loss by epoch, the same with and without the death of a node; the world size goes from "
        f"{' to '.join(str(ranks) for _, ranks in worlds)}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}\n</style>",
            *losses,
            *sizes,
            loss_line("plain", plain),
            loss_line("run", points),
            f'<polyline class="run" points="{" ".join(steps)}"/>',
            *kills,
            *epochs,
            legend,
            "</svg>\n",
        ]
    )
