"""Writes SVG by hand: few elements, short numbers, colours that follow the page's light or dark."""

import math
import sys
from pathlib import Path

from tools.steps import ROOT

STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
.start { text-anchor: start } .end { text-anchor: end } .small { font-size: 10px }
path { color: #59636e; fill: none; stroke: currentColor; stroke-linejoin: round }
.a { color: #0969da; fill: #ddf4ff } .b { color: #9a6700; fill: #fff1d6 }
.c { color: #1a7f37; fill: #dafbe1 } .d { color: #8250df; fill: #fbefff }
.e { color: #cf222e; fill: #ffebe9 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } path { color: #9198a1 }
  .a { color: #79c0ff; fill: #0c2d6b } .b { color: #e3b341; fill: #4b2900 }
  .c { color: #7ee787; fill: #04260f } .d { color: #d2a8ff; fill: #3c1e70 }
  .e { color: #ff7b72; fill: #490202 }
}
.line { fill: none; stroke-width: 2 } .wide { stroke-width: 6; stroke-opacity: 0.5 }
.solid { fill: currentColor; stroke: none }
.dashed { fill: none; stroke-dasharray: 4 3 } .dotted { stroke-dasharray: 1.5 2.5 }
</style>"""


def assets_folder():
    """Returns where to draw: in the folder that the command line names, or in docs/assets/."""
    return Path(sys.argv[1] if sys.argv[1:] else ROOT / "docs" / "assets").resolve()


def short(number):
    return f"{round(number, 1):g}"


class Scale:
    """Maps the values from low to high to the pixels from start to end."""

    def __init__(self, low, high, start, end, log=False):
        self.transform = math.log if log else float
        self.low, self.start, self.end = low, start, end
        self.pixels = (end - start) / (self.transform(high) - self.transform(low))

    def __call__(self, value):
        return self.start + self.pixels * (self.transform(value) - self.transform(self.low))


class Picture:
    """What has the same look is one path; texts are drawn last, over the paths."""

    def __init__(self, width, height, title, style=STYLE):
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
        self.head += [f"<title>{title}</title>", style]
        self.paths = {}
        self.texts = []

    def text(self, x, y, text, look="start"):
        """Writes a text; if there are several x, each is that of one character."""
        places = " ".join(map(short, x)) if isinstance(x, list) else short(x)
        css_class = f' class="{look}"' if look else ""
        self.texts.append(f'<text{css_class} x="{places}" y="{short(y)}">{text}</text>')

    def path(self, path, look=""):
        self.paths.setdefault(look, []).append(path)

    def box(self, x, y, width, height, look=""):
        across = short(width)
        self.path(f"M{short(x)} {short(y)}h{across}v{short(height)}h-{across}z", look)

    def curve(self, x_scale, y_scale, points, look):
        places = (f"{short(x_scale(x))} {short(y_scale(y))}" for x, y in points)
        self.path("M" + "L".join(places), look)

    def x_axis(self, scale, y, marks, name):
        """Draws the axis of a scale; marks are labels by value."""
        self.path(f"M{scale.start} {y}H{scale.end}")
        for value, label in marks.items():
            self.path(f"M{short(scale(value))} {y}v4")
            self.text(scale(value), y + 18, label, "")
        self.text((scale.start + scale.end) / 2, y + 36, name, "")

    def y_axis(self, scale, x, marks, name):
        self.path(f"M{x} {scale.start}V{scale.end}")
        for value, label in marks.items():
            self.path(f"M{x} {short(scale(value))}h-4")
            self.text(x - 7, scale(value) + 4.5, label, "end")
        self.text(4, scale.end - 18, name)

    def legend(self, x, y, looks, across=0):
        """Draws a line or a box for each look, and its name; below each other, or so far across."""
        for place, (look, name) in enumerate(looks.items()):
            left, center = (x + across * place, y) if across else (x, y + 20 * place)
            if "line" in look:
                self.path(f"M{left - 6} {center}h24", look)
            else:
                self.box(left, center - 8, 16, 16, look)
            self.text(left + 24, center + 4.5, name)

    def save(self, path):
        paths = []
        for look, data in self.paths.items():
            css_class = f' class="{look}"' if look else ""
            paths.append(f'<path{css_class} d="{"".join(data)}"/>')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*self.head, *paths, *self.texts, "</svg>\n"]))
