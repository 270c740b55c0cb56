"""Each mutation in mutations.txt fails the tests beside it: in a copy, in all its files at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import NIGHTLY

from tools.chain.quotes import mutated_files
from tools.steps import ROOT
from tools.units.answers import full_name

PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:warnings"]
TIME_LIMIT_S = 600
_, *MUTATIONS = Path(__file__).with_name("mutations.txt").read_text().splitlines()
pytestmark = NIGHTLY


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutation(mutation, tmp_path):
    patterns, old, new, test = mutation.split(" | ")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "site", "runs", "*.pyc"))
    tests = []
    for path in mutated_files(copy, patterns):
        text = path.read_text()
        assert text.count(old) == 1, f"mutations.txt: {old!r} is not once in {path.name}"
        path.write_text(text.replace(old, new))
        tests.append(full_name(f"test_{test}".format(path.relative_to(copy))))
    command = [*PYTEST, f"--basetemp={tmp_path}/tmp", *tests]
    env = os.environ | {"TIMEOUT_S": "45"}  # who has hung for so long, hangs
    run = subprocess.run(
        command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert f"= {len(tests)} failed in " in run.stdout, run.stdout
