import os

import pytest
import torch
from helpers import Shell


@pytest.fixture
def shell(tmp_path):
    """Runs commands in a folder of the test's own, and ends what is left of them after it."""
    shell = Shell(tmp_path)
    yield shell
    shell.end_all()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With FAIL_ON_SKIP set, as CI sets it, a test may be skipped for want of a GPU alone."""
    report = yield
    if report.skipped and "FAIL_ON_SKIP" in os.environ and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report
