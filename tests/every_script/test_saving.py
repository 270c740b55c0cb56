"""How each file saves and loads, read in the sources: a power cut, or a real GPU, would show it."""

import re

import pytest
from helpers import NAMES

from tools.steps import ROOT

SOURCES = {name: (ROOT / name).read_text() for name in NAMES}
SYNC_AND_REPLACE = (
    r"file\.flush\(\)\n +os\.fsync\(file\.fileno\(\)\)\n.+\n +os\.replace\(tmp_path, path\)"
)


@pytest.mark.parametrize("name", [name for name in SOURCES if "torch.save(" in SOURCES[name]])
def test_save(name):
    """A snapshot has reached the disk before it replaces the one before it."""
    assert re.search(SYNC_AND_REPLACE, SOURCES[name])


@pytest.mark.parametrize("name", [name for name in SOURCES if "torch.load(" in SOURCES[name]])
def test_load(name):
    """No rank loads onto the GPU of rank 0; no file runs code, whichever version torch has."""
    for arguments in re.findall(r"torch\.load\((.*)\)", SOURCES[name]):
        assert re.search(r', (map_location=)?"(cpu|meta)"', arguments)
        assert ", weights_only=True" in arguments
