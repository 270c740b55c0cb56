"""The recordings that docs/watch.md and other pages play, made by tools/watch/series.py."""

import re

from tools.edits import read
from tools.steps import ROOT

RECORDINGS = ROOT / "docs" / "assets" / "recordings.json"


def recorded_source(file):
    """Returns the script of a recording, such as `multinode.py` or `fault 2: multigpu.py`."""
    fault = re.match(r"fault (\d+)", file)
    return read("faults")[int(fault[1]) - 1].source() if fault else (ROOT / file).read_text()
