"""The pictures of docs/assets/: small, legible, and as the code draws them now."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tools.steps import ROOT

PICTURES = sorted((ROOT / "docs" / "assets").rglob("*.svg"))


def draw(script, folder):
    command = [sys.executable, "-m", f"tools.pages.{script}", folder]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_pictures_are_small():
    """A picture is well-formed, and all together are not more than a reviewer can read."""
    texts = [picture.read_text() for picture in PICTURES]
    assert all(ElementTree.fromstring(text).tag.endswith("}svg") for text in texts)
    assert sum(text.count("\n") for text in texts) <= 3000
    assert sum(len(text) for text in texts) <= 250_000


@pytest.mark.long
def test_letters_in_pictures():
    """None is larger than those of the text, nor too small on a phone."""
    for picture in PICTURES:
        text = picture.read_text()
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])
        used = re.findall(r"font: ([\d.]+)px", text)
        if 'class="small"' in text:
            used += re.findall(r"font-size: ([\d.]+)px", text)
        sizes = [float(size) / width for size in used]
        # Shown at 22rem, with text of 0.9rem, or smaller, if its own width says so.
        own_width = float(re.search(r' width="([\d.]+)', text)[1])
        assert max(sizes) * min(440, own_width) <= 18, picture
        assert min(sizes) * min(368, own_width) >= 7.5, picture


SLOW = [
    pytest.param(s, marks=[pytest.mark.nightly, pytest.mark.long])
    for s in ("charts", "experts", "fsdp_calls", "placements")
]


@pytest.mark.parametrize("script", ["minimap", *SLOW])
def test_pictures_are_current(script, tmp_path):
    """What ranks hold and FSDP calls is still as the pages show it, and so are the charts."""
    draw(script, tmp_path)
    drawn = [picture.relative_to(tmp_path) for picture in tmp_path.rglob("*.svg")]
    assert drawn
    for picture in drawn:
        shown = ROOT / "docs" / "assets" / picture
        assert (tmp_path / picture).read_text() == shown.read_text(), picture
