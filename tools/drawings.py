"""Draws the pictures of docs/index.md into docs/assets, as SVG for light and dark pages."""

from steps import ROOT

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.start { text-anchor: start } .end { text-anchor: end } .small { font-size: 12px }
rect { fill: none; stroke: #59636e; rx: 6px }
path { fill: none; stroke: #59636e; stroke-width: 1.5 }
.one { fill: #ddf4ff; stroke: #0550ae } .two { fill: #fff1d6; stroke: #7d4e00 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect, path { stroke: #9198a1 }
  .one { fill: #0c2d6b; stroke: #79c0ff } .two { fill: #4b2900; stroke: #e3b341 }
}"""


def box(x, y, width, height, kind="", *lines, size=""):
    """Returns a box with lines of text in its middle."""
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    texts = [
        text(x + width / 2, top + 18 * number, line, size) for number, line in enumerate(lines)
    ]
    where = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return "".join([f'<rect class="{kind}" {where}/>', *texts])


def text(x, y, words, kind=""):
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{words}</text>'


def svg(width, height, title, *parts):
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<title>{title}</title>",
            f"<style>{STYLE}\n</style>",
            *parts,
            "</svg>\n",
        ]
    )


def ranks():
    """Two nodes with two processes each."""
    parts = []
    for node in range(2):
        left = 10 + 355 * node
        parts += [box(left, 10, 325, 170), text(left + 12, 32, f"node {node}", "start")]
        for local_rank in range(2):
            rank = 2 * node + local_rank
            x = left + 15 + 150 * local_rank
            lines = f"rank {rank}", f"local rank {local_rank}"
            parts.append(box(x, 45, 145, 62, ("one", "two")[local_rank], *lines))
            parts.append(f'<path d="M{x + 72} 107 v18"/>')
            parts.append(box(x, 125, 145, 40, "", f"GPU {local_rank}"))
    parts.append('<path d="M180 180 v28 h350 v-28"/>')
    parts.append(text(355, 228, "the network, over which gradients are averaged: world size 4"))
    title = "Two nodes with two GPUs each: ranks 0 to 3, and on each node local ranks 0 and 1"
    return svg(700, 240, title, *parts)


def backward():
    """When the gradients of three layers are computed, and when DDP all-reduces them."""
    parts = [
        text(112, 52, "compute", "end"),
        text(112, 112, "all-reduce", "end"),
    ]
    for number, layer in enumerate((3, 2, 1)):
        kind = ("one", "two", "one")[number]
        parts.append(box(122 + 140 * number, 26, 134, 42, kind, f"gradient, layer {layer}"))
        parts.append(box(262 + 140 * number, 86, 120, 42, kind, f"bucket {number + 1}"))
        parts.append(f'<path d="M{256 + 140 * number} 68 q2 18 8 22"/>')
    parts.append('<path d="M122 150 h558 m-8 -5 l8 5 l-8 5"/>')
    parts.append(text(401, 172, "time: backward() runs from the last layer to the first", "small"))
    title = "While backward computes the gradients of earlier layers, later ones are all-reduced"
    return svg(700, 182, title, *parts)


if __name__ == "__main__":
    for draw in (ranks, backward):
        (ROOT / "docs" / "assets" / f"{draw.__name__}.svg").write_text(draw())
