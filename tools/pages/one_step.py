"""Draws one training step of two ranks, as an animation, from the recording of multigpu.py.

`make docs` runs this. The last frame shows all that has happened, and where no motion is wanted,
the picture is that frame.
"""

import json

from tools.steps import ROOT
from tools.watch.recordings import RECORDINGS

PICTURE = ROOT / "docs" / "assets" / "one_step.svg"
STEP = 2  # the index of the one shown, the first of an epoch; its two gradients differ in sign
CENTER, AXES = 240, (94, 386)  # of the picture, and of each rank's half
TILE, PITCH = 24, 28
LONGEST = 66  # bar of a gradient
SAMPLES, OWN, MEAN, WEIGHT = 124, 167, 210, 253
LABELS = {
    SAMPLES: ("own samples", "DistributedSampler", ""),
    OWN: ("own gradient", "loss.backward()", ""),
    MEAN: ("mean gradient", "DDP: all-reduce", "moves covered"),
    WEIGHT: ("equal weights", "optimizer.step()", ""),
}
STYLE = """<style>
svg { --text: #1f2328; --grey: #59636e; --line: #d1d9e0; --page: #ffffff; --box: #f6f8fa;
  --a: #0969da; --b: #9a6700; --mean: #8250df }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6edf3; --grey: #9198a1; --line: #3d444d; --page: #0d1117; --box: #151b23;
    --a: #79c0ff; --b: #e3b341; --mean: #d2a8ff }
}
text { font: 13px system-ui, sans-serif; fill: var(--text); text-anchor: middle }
.a { fill: var(--a) } .b { fill: var(--b) } .mean { fill: var(--mean) }
.page { fill: var(--page); stroke: var(--line) } .box { fill: var(--box); stroke: var(--line) }
rect.empty { fill: none; stroke: var(--line) } rect.a.empty { stroke: var(--a) }
rect.b.empty { stroke: var(--b) } .axis { stroke: var(--grey) }
.left { text-anchor: start } .bold, .on { font-weight: 600 } .on { fill: var(--page) }
.grey, .code { fill: var(--grey) } .code { font: 11px ui-monospace, monospace }
.copy.a { --beside: translate(-30px, 0) } .copy.b { --beside: translate(30px, 0) }
.copy, .band { opacity: 0 } .band { fill: var(--mean); transform: translateY(129px) }
@media (prefers-reduced-motion: no-preference) {
  .moves { animation: 10s ease-in-out infinite backwards }
  .tile { animation-name: tile } .all { animation-name: all } .bar { animation-name: bar }
  .own { animation-name: own } .copy { animation-name: copy } .covered { animation-name: covered }
  .shared { animation-name: shared } .mean.bar { animation-name: mean } .new { animation-name: new }
  .band { animation-name: band }
}
@keyframes tile {
  0% { opacity: 0 } 3%, 96% { opacity: 1 } 100% { opacity: 0 }
  0%, 5% { transform: var(--from) } 14%, 100% { transform: none }
}
@keyframes all { 0% { opacity: 0 } 3%, 96% { opacity: 1 } 100% { opacity: 0 } }
@keyframes bar { 0%, 26% { transform: scaleX(0) } 35%, 100% { transform: none } }
@keyframes own { 0%, 34% { opacity: 0 } 38%, 100% { opacity: 1 } }
@keyframes copy {
  0%, 45% { opacity: 0 } 46%, 59% { opacity: 1 } 62%, 100% { opacity: 0 }
  0%, 46% { transform: var(--from) } 53%, 57% { transform: var(--beside) }
  61%, 100% { transform: none }
}
@keyframes covered { 45% { opacity: 1 } 48%, 64% { opacity: 0 } 68% { opacity: 1 } }
@keyframes shared {
  0%, 58% { opacity: 0 } 61%, 100% { opacity: 1 }
  0%, 63% { transform: var(--from) } 69%, 100% { transform: none }
}
@keyframes mean { 0%, 66% { transform: scaleX(0) } 72%, 100% { transform: none } }
@keyframes new {
  0%, 74% { opacity: 0; transform: translateX(-12px) } 80%, 100% { opacity: 1; transform: none }
}
@keyframes band {
  0% { opacity: 0 } 4%, 84% { opacity: 0.1 } 88%, 100% { opacity: 0 }
  0%, 24% { transform: none } 27%, 43% { transform: translateY(43px) }
  46%, 69% { transform: translateY(86px) } 72%, 100% { transform: translateY(129px) }
}
</style>"""


def steps_of(events):
    """Returns the values of a rank at the end of each step, and its epoch and weight before."""
    steps, values = [], {}
    for _, _, changed in events:
        if "step" in changed:
            steps.append({"in epoch": values["epoch"], "old weight": values.get("weight")})
        values |= changed
        if steps:
            steps[-1] |= changed
    return steps


def number(value, digits=3):
    return f"{float(value):.{digits}f}".replace("-", "\N{MINUS SIGN}")


def text(look, x, y, content):
    return f'<text class="{look}" x="{x}" y="{y}">{content}</text>'


def rect(look, x, y, width, height):
    return f'<rect class="{look}" x="{x}" y="{y}" width="{width}" height="{height}" rx="3"/>'


def filled(look, x, y, width, height, content):
    """Returns a filled box around (x, y) with a text."""
    box = rect(look, x - width / 2, y - height / 2, width, height)
    return box + text("on", x, y + 4.5, content)


def moving(name, content, x=0, y=0, delay=0):
    """Returns a group that moves, from (x, y) relative to where it ends; STYLE says when."""
    style = f"--from:translate({x}px,{y}px);animation-delay:{delay}s"
    return f'<g class="moves {name}" style="{style}">{content}</g>'


def bar(look, axis, row, length):
    """Returns a bar that grows from an axis, to the left if its length is negative."""
    shape = f"M{axis} {row - 7}h{length:.1f}v14H{axis}z"
    return f'<path class="moves bar {look}" style="transform-origin:{axis}px" d="{shape}"/>'


def draw_samples(rank, steps):
    """Returns the samples of a rank in an epoch; copies of its first step's move to its half."""
    parts = []
    of_step = len(steps[0]["samples"].split())
    for place, sample in enumerate(" ".join(step["samples"] for step in steps).split()):
        order = place * len(AXES) + rank
        x, y = 28 + order * PITCH, 46
        look = "ab"[rank] if place < of_step else ""
        parts.append(rect(f"empty {look}", x - TILE / 2, y - TILE / 2, TILE, TILE))
        parts.append(text("grey", x, y + 4.5, sample))
        if look:
            end = AXES[rank] - 45 + place * 30
            tile = filled(look, end, SAMPLES, TILE, TILE, sample)
            parts.append(moving("tile", tile, x - end, y - SAMPLES, order / 10))
    return parts


def draw_rank(rank, step, unit):
    """Returns what moves in a rank's half but its samples; `unit` is the length of a bar of 1."""
    axis, look = AXES[rank], "ab"[rank]
    own, mean = float(step["own gradient"]), float(step["gradient"])
    own_x, mean_x = (axis + (44 if value < 0 else -44) for value in (own, mean))  # of the values
    copy = filled(look, CENTER, MEAN, 56, 22, number(own))
    shared = filled("mean", mean_x, MEAN, 56, 22, number(mean))
    new = text("mean bold", axis + 42, WEIGHT + 4.5, number(step["weight"], 4))
    arrow = text("grey", axis + 1, WEIGHT + 4.5, "\N{RIGHTWARDS ARROW}")
    return [
        bar(look, axis, OWN, own * unit),
        bar("mean", axis, MEAN, mean * unit),
        f'<path class="axis" d="M{axis} {OWN - 14}V{MEAN + 14}"/>',
        moving("own", text(look, own_x, OWN + 4.5, number(own))),
        moving("shared", shared, CENTER - mean_x),
        moving(f"copy {look}", copy, own_x - CENTER, OWN - MEAN),
        moving("new", arrow + new),
    ]


def draw():
    """Returns the lines of the picture."""
    recording = json.loads(RECORDINGS.read_text())["multigpu.py"]
    ranks = [steps_of(events) for events in recording["attempts"][0]]
    longest = max(abs(float(steps[STEP]["own gradient"])) for steps in ranks)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="381" viewBox="0 0 480 286">',
        "<title>A step of multigpu.py on two ranks</title>",
        STYLE,
        rect("page", 0.5, 0.5, 479, 285),
        *(rect("box", axis - 82, 76, 164, 200) for axis in AXES),
        rect("moves band", 12, SAMPLES - 19, 456, 38),
        text("left grey", 16, 24, "shuffled samples of this step"),
        text("left grey", 16 + 8 * PITCH, 24, "of the next step"),
    ]
    for row, (name, code, look) in LABELS.items():
        label = text("bold", CENTER, row - 3, name) + text("code", CENTER, row + 13, code)
        parts.append(f'<g class="{look}">{label}</g>')
    for rank, (axis, steps) in enumerate(zip(AXES, ranks, strict=True)):
        step = steps[STEP]
        parts.append(text(f"{'ab'[rank]} bold", axis, 97, f"rank {rank}"))
        parts.append(text("", axis - 41, WEIGHT + 4.5, number(step["old weight"], 4)))
        parts += draw_samples(rank, [s for s in steps if s["in epoch"] == step["in epoch"]])
        parts.append(moving("all", "".join(draw_rank(rank, step, LONGEST / longest))))
    return [*parts, "</svg>\n"]


def main():
    PICTURE.write_text("\n".join(draw()))


if __name__ == "__main__":
    main()
