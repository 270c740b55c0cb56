"""Writes SVG by hand: few elements, short numbers, colours that follow the page's light or dark."""

import math

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
.line { fill: none; stroke-width: 2 } .wide { fill: none; stroke-width: 6; stroke-opacity: 0.5 }
.dots { stroke-width: 7; stroke-linecap: round } .solid { fill: currentColor; stroke: none }
.dashed { fill: none; stroke-dasharray: 4 3 } .dotted { stroke-dasharray: 1.5 2.5 }
</style>"""


def short(number):
    return f"{round(number, 1):g}"


def scale(low, high, start, end, log=False):
    """Returns a function that maps the values from low to high to the pixels from start to end."""
    transform = math.log if log else float
    pixels = (end - start) / (transform(high) - transform(low))
    return lambda value: start + pixels * (transform(value) - transform(low))


class Picture:
    """What has the same look is one path; texts are drawn last, over the paths."""

    def __init__(self, width, height, title):
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self.head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">']
        self.head += [f"<title>{title}</title>", STYLE]
        self.paths = {}
        self.texts = []

    def text(self, x, y, text, look="start"):
        self.texts.append(f'<text class="{look}" x="{short(x)}" y="{short(y)}">{text}</text>')

    def digits(self, xs, y, digits, look):
        """Writes one digit at each x."""
        places = " ".join(map(short, xs))
        self.texts.append(f'<text class="{look}" x="{places}" y="{short(y)}">{digits}</text>')

    def path(self, path, look=""):
        self.paths.setdefault(look, []).append(path)

    def box(self, x, y, width, height, look="", text=""):
        width = short(width)
        self.path(f"M{short(x)} {short(y)}h{width}v{short(height)}h-{width}z", look)
        if text != "":
            self.text(x + float(width) / 2, y + height / 2 + 4.5, text, "")

    def line(self, points, look):
        self.path("M" + "L".join(f"{short(x)} {short(y)}" for x, y in points), look)

    def dots(self, points, look):
        self.path("".join(f"M{short(x)} {short(y)}h0" for x, y in points), look)

    def arrow_right(self, x, y, length):
        self.path(f"M{short(x)} {short(y)}h{short(length)}m-5-4l5 4l-5 4")

    def x_axis(self, y, left, right, marks, name):
        """Draws an axis with marks, which are pairs of a pixel and its label."""
        self.path(f"M{short(left)} {short(y)}H{short(right)}")
        for x, label in marks:
            self.path(f"M{short(x)} {short(y)}v4")
            self.text(x, y + 18, label, "")
        self.text((left + right) / 2, y + 36, name, "")

    def y_axis(self, x, top, bottom, marks, name):
        self.path(f"M{short(x)} {short(top)}V{short(bottom)}")
        for y, label in marks:
            self.path(f"M{short(x)} {short(y)}h-4")
            self.text(x - 7, y + 4.5, label, "end")
        self.text(4, top - 12, name)

    def legend(self, x, y, looks):
        """Draws a line for each look, which is a pair of the line's look and its name."""
        for row, (look, name) in enumerate(looks):
            self.path(f"M{short(x)} {short(y + 20 * row)}h26", look)
            self.text(x + 34, y + 20 * row + 4.5, name)

    def save(self, path):
        paths = []
        for look, data in self.paths.items():
            css_class = f' class="{look}"' if look else ""
            paths.append(f'<path{css_class} d="{"".join(data)}"/>')
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*self.head, *paths, *self.texts, "</svg>\n"]))
