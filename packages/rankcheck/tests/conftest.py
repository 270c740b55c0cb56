import os

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests run on CPUs, whatever the machine has


@pytest.hookimpl(tryfirst=True)  # pytest then chooses by these marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("long")
