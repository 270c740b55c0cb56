"""Draws the loss of an elastic run over that of an undisturbed one, and its world size, as SVG."""

import itertools
import re

import matplotlib
from matplotlib.figure import Figure

EPOCH_SIZE = 2048  # samples
# Legible on light and on dark pages.
GREY, BLUE, YELLOW, RED = "#6e7781", "#2f81f7", "#d4a72c", "#da3633"


def parse(log):
    """Returns a log's losses as (epochs, loss), and its worlds as (first epoch, world size)."""
    losses = []
    worlds = []
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


def draw(log, plain_log, path):
    losses, worlds = parse(log)
    plain_losses, _ = parse(plain_log)
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = dict.fromkeys(colors, GREY) | {"font.size": 12}
    style |= {"svg.hashsalt": "", "svg.fonttype": "none"}  # the same file each time, text as text
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
        loss_axes, world_axes = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        loss_axes.semilogy(*zip(*plain_losses, strict=True), YELLOW, lw=5, label="undisturbed")
        loss_axes.semilogy(*zip(*losses, strict=True), BLUE, lw=1.5, label="elastic_ddp.py")
        loss_axes.set_ylabel("loss")
        starts, sizes = zip(*worlds, strict=True)
        world_axes.step([*starts, losses[-1][0]], [*sizes, sizes[-1]], BLUE, where="post")
        world_axes.set(
            ylabel="world size",
            xlabel="epochs",
            yticks=range(max(sizes) + 1),
            ylim=(0, max(sizes) + 0.5),
        )
        for (_, before), (epochs, after) in itertools.pairwise(worlds):
            if after < before:
                loss_axes.axvline(epochs, color=RED, ls="--", lw=1, label="a node fails")
                world_axes.axvline(epochs, color=RED, ls="--", lw=1)
        loss_axes.legend(frameon=False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
