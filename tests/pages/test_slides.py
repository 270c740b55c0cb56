"""make slides: a file of slides, looked at as in a lecture."""

import html
import re

import pytest
from browser import browser_of, needs_browser
from helpers import run

from tools.steps import ROOT, STEPS, diff_lines

# Of the slide that is shown: how far its contents reach, and the least size and width of its code.
LOOK = """() => {
  const shown = [...Reveal.getCurrentSlide().querySelectorAll("h1, h2, p, pre, svg")];
  const boxes = shown.filter((box) => !box.closest("aside"));
  const code = boxes.filter((box) => box.tagName === "PRE");
  return {
    bottom: Math.max(...boxes.map((box) => box.getBoundingClientRect().bottom)),
    hidden: Math.max(0, ...code.map((box) => box.scrollWidth - box.clientWidth)),
    size: Math.min(99, ...code.map((box) => parseFloat(getComputedStyle(box.firstChild).fontSize))),
  };
}"""


@pytest.mark.long
@needs_browser
def test_slides(tmp_path):
    """Each added line is on one slide, readable from the last row, and nothing is fetched."""
    assert run("make", ".venv/slides").returncode == 0
    path = tmp_path / "site" / "slides.html"
    result = run("python", "-m", "tools.pages.slides", str(path))
    assert result.returncode == 0, result.stderr
    rows = re.findall(r"<(ins|del) class=\"line\".*?>(.*?)\n</", path.read_text())
    signs = {"ins": "+", "del": "-"}
    shown = [signs[tag] + html.unescape(re.sub("<.*?>", "", row)).strip() for tag, row in rows]
    for step in STEPS:
        docstrings = "".join((ROOT / f).read_text().partition("import")[0] for f in step[:2])
        for line in diff_lines(step.base, step.file):
            if line[0] == "+" and line[1:] not in docstrings:
                assert f"+{line[1:].strip()}" in shown
    with browser_of(path.parent) as (tab, address):
        requests = []
        tab.on("request", lambda request: requests.append(request.url))
        tab.set_viewport_size({"width": 1280, "height": 720})
        tab.goto(f"{address}/slides.html")
        tab.wait_for_function("window.Reveal && Reveal.isReady()")
        for _ in range(tab.evaluate("Reveal.getTotalSlides()")):
            look = tab.evaluate(LOOK)
            assert look["bottom"] <= 720 and look["hidden"] <= 1 and look["size"] >= 18, look
            tab.evaluate("Reveal.next()")
    assert requests == [f"{address}/slides.html"]
