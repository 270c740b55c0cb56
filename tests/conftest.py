import fcntl
import os
import shutil
import sys

import pytest
import torch
from helpers import IGNORED, run

from tools import steps
from tools.launch.jobs import Shell
from tools.steps import ROOT

# Tests run on CPUs, whatever the machine has. Those marked gpu use TEST_GPUS, the GPUs that were
# visible: found by the first process, from which pytest's workers have their environment.
if "TEST_GPUS" not in os.environ:
    names = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(names)).split(",")
    os.environ["TEST_GPUS"] = ",".join(visible[: len(names)])
    if "PRETEND_GPUS" in os.environ:
        os.environ["TEST_GPUS"] = ""  # none of them is real
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def torch_as_before():
    """Takes back what a test has set in this process."""
    yield
    torch.set_default_dtype(torch.float32)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def shell(tmp_path):
    """Runs commands in a folder of the test's own, and ends what is left of them after it."""
    shell = Shell(tmp_path)
    yield shell
    shell.end_all()


@pytest.fixture
def cluster(shell):
    """Starts a pocket cluster in a folder like this repository's, to run a Bash script there."""
    (shell.folder / "slurm").mkdir()
    own = {ROOT / "slurm" / name for name in ("site.sh", "schedulers")}
    for path in {*ROOT.glob("*.py"), *ROOT.glob("slurm/*")} - own:
        (shell.folder / path.relative_to(ROOT)).symlink_to(path)
    (shell.folder / ".venv").symlink_to(sys.prefix)

    def start(script, options="", prefix=""):
        (shell.folder / "script").write_text(f"set -eu\n{script}\n")
        return shell.start(f"{prefix} slurm/pocket-cluster {options} bash script")

    return start


@pytest.fixture
def copy(tmp_path):
    """A repository of its own with the chain, its tools and what quotes it committed."""
    (tmp_path / "docs" / "assets").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "assets" / "units.json", tmp_path / "docs" / "assets")
    for folder in ("tools", "slurm", "recipes", "by_hand", "gpt", "ports"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in {step.base for step in steps.STEPS} | {step.file for step in steps.STEPS}:
        shutil.copy(ROOT / name, tmp_path)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        assert run(*git, *command, folder=tmp_path).returncode == 0
    return tmp_path


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built from a copy as `make docs` builds it, once for all workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of this run
    folder = base / "copy-for-site"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "site").exists():
            shutil.copytree(ROOT, folder, ignore=IGNORED, dirs_exist_ok=True)
            result = run("make", "-o", ".venv/dev", "docs", folder=folder)
            assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


# First comes what builds the site, for which other workers would wait, then the longest: whoever
# took one of these last would keep the others waiting.
FIRST = ("test_scripts_of_the_pages_run", "test_job_files", "test_preemptible[grace-")


def pytest_make_parametrize_id(val, argname):
    """Returns the id of a parameter: a step's is its file, and a number's says what it counts."""
    if isinstance(val, steps.Step):
        return val.file
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, (bool, int, float)):
        return f"{argname}={val}"
    if isinstance(val, dict):
        val = [f"{name}={value}" for name, value in val.items()]
    if isinstance(val, (list, tuple)):
        val = " ".join(map(str, val))
    elif not isinstance(val, str) or len(val) <= 100:
        return None  # pytest makes one
    return val.strip().partition("\n")[0][:60].encode("unicode_escape").decode()


@pytest.hookimpl(tryfirst=True)  # pytest then chooses by these marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("nightly") and not item.get_closest_marker("path"):
            item.add_marker("long")
    items.sort(key=lambda item: [not item.name.startswith(name) for name in FIRST])
    if not os.environ["TEST_GPUS"]:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_terminal_summary(terminalreporter):
    if len(os.environ["TEST_GPUS"].split(",")) == 1 and os.environ["TEST_GPUS"]:
        terminalreporter.write_line("with one GPU, the tests of GPUs ran one rank: none sent data")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With FAIL_ON_SKIP set, as CI sets it, a test may be skipped for want of a GPU alone."""
    report = yield
    if report.skipped and "FAIL_ON_SKIP" in os.environ and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report
