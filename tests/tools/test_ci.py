"""The shell lines of the workflows and the container run, beside stubs of what takes long.

Stubs cannot see the runner: what it refuses, lacks or has in another version, only a push shows.
"""

import json
import re
import shutil
import sys

import pytest
import yaml
from helpers import IGNORED, NIGHTLY, run

from tools.steps import ROOT

# Writes down what it is called with; as Python, it makes environments of stubs.
STUB = """#!/bin/sh
echo "${{0##*/}} $* | index $PIP_EXTRA_INDEX_URL | fail $FAIL_ON_SKIP" >> {folder}/log
[ "$(echo "${{0##*/}}" $*)" != "$FAILS" ] || exit 1
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p "$3/bin"
for name in python pytest cog ruff zensical; do cp "$0" "$3/bin/$name"; done
"""
SUDO = """#!/bin/sh
shift && exec /usr/bin/env -i PATH={folder}/root:/usr/bin:/bin "$@"  # but for what is named
"""
STUBS = dict.fromkeys(["bin/python3", "bin/apt-get", "bin/shellcheck", "root/apt-get"], STUB)
STUBS |= {"bin/sudo": SUDO, "root/python3": "#!/bin/sh\nexit 1\n"}
WORKFLOWS = [yaml.safe_load(path.read_text()) for path in ROOT.glob(".github/workflows/*.yml")]
CONTAINER = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
CONTAINER_JOB = {"steps": [{"run": CONTAINER["postCreateCommand"]}]}


def rows(matrix):
    """Returns the values of each job of a matrix of one list, or of rows."""
    named = [{name: value} for name, values in matrix.items() for value in values]
    return matrix.get("include") or named or [{}]


JOBS = [({"name": "container", "env": CONTAINER["containerEnv"]}, CONTAINER_JOB, {})]
JOBS += [
    (workflow, job, row)
    for workflow in WORKFLOWS
    for job in workflow["jobs"].values()
    for row in rows(job.get("strategy", {}).get("matrix", {}))
]


@pytest.fixture
def stubs(tmp_path):
    """Copies this repository, with stubs beside it; returns the variables that find them."""
    shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True)
    for path, text in STUBS.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text.format(folder=tmp_path))
        (tmp_path / path).chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


def calls_of(folder, command, env):
    """Returns a command's exit status, and what it calls to test, check or build."""
    (folder / "log").unlink(missing_ok=True)
    result = run(*command.split(), folder=folder / "copy", env=env)
    ours = r"^((?:pytest|python -m (?:tools|tests|pytest)|ruff|zensical).*?) *\|"
    return result.returncode, re.findall(ours, (folder / "log").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", [".ci/run", ".ci/nightly", "make docs", "make long"])
def test_failure_is_told(tmp_path, stubs, command):
    """If a call fails, so does the command; the others of the night come all the same."""
    status, calls = calls_of(tmp_path, command, stubs)
    assert status == 0 and calls
    for number, call in enumerate(calls):
        status, called = calls_of(tmp_path, command, stubs | {"FAILS": call})
        assert status != 0, call
        assert called == (calls[: number + 1] if command != ".ci/nightly" else calls)


def test_job_file_that_bash_cannot_read(tmp_path, stubs):
    with open(tmp_path / "copy" / "slurm" / "elastic_ddp.sbatch", "a") as file:
        file.write("if\n")
    result = run("make", "lint", folder=tmp_path / "copy", env=stubs)
    assert result.returncode and "syntax error" in result.stderr


@pytest.mark.parametrize("workflow, job, row", JOBS, ids=lambda value: value.get("name", ""))
def test_job(tmp_path, stubs, workflow, job, row):
    """Each step ends well; pip sees the index of small builds, and no test may be skipped."""
    copy = tmp_path / "copy"
    env = stubs | dict.fromkeys(workflow["env"], "of-cpus")
    for step in job["steps"]:
        condition = step.get("if", "").removeprefix("matrix.")
        if "run" in step and (not condition or row.get(condition)):
            line = re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: row[match[1]], step["run"])
            result = run("bash", "-e", "-c", line, folder=copy, env=env)
            assert result.returncode == 0, f"{step['run']}\n{result.stderr}"
        assert "cache" not in step.get("with", {})  # that of pip is root's, under sudo
    log = (tmp_path / "log").read_text()
    assert {*re.findall(r"python -m pip install .* \| index (\S*)", log)} == {"of-cpus"}
    tests = re.findall(r"^pytest .* \| fail (.*)", log, re.MULTILINE)
    assert {*tests} <= {"1"}
    assert re.search(r"^(pytest|python -m|zensical) ", log, re.MULTILINE)
    assert all(re.findall(r"(?:requirements|dev)\.txt( -c constraints\.txt)?", log))
    assert bool((copy / "constraints.txt").read_text().strip()) != row.get("unpin", False)


def resolve(*requirements):
    """Returns the names of what pip would install, and of those that their authors withdrew."""
    result = run(sys.executable, "-m", "pip", "install", "--dry-run", "-I", *requirements)
    if result.returncode:
        pytest.skip(f"pip finds no index, or not all packages there: {result.stderr[-500:]}")
    line = re.search(r"^Would install (.*)", result.stdout, re.MULTILINE)[1]
    names = {name.rpartition("-")[0] for name in line.split()}
    return names, re.findall(r"a yanked version: '(\S+)'", result.stderr)


@NIGHTLY
def test_pins():
    """What is needed is pinned, but for CUDA's packages; no other, and no withdrawn release is."""
    assert resolve("--no-deps", "soupsieve==3.0.1") == ({"soupsieve"}, ["soupsieve"])
    needed, withdrawn = resolve("-r", "requirements/dev.txt", "-c", "constraints.txt")
    assert withdrawn == []
    needed = {name for name in needed if not name.startswith(("nvidia", "cuda", "triton"))}
    text = (ROOT / "constraints.txt").read_text()
    assert needed == {*re.findall(r"^(\S+)==", text, re.MULTILINE)}


def test_each_part_of_the_night_is_a_job():
    (parts,) = re.findall(r"set -- (.*)", (ROOT / ".ci" / "nightly").read_text())
    assert parts.split() == [row["part"] for _, _, row in JOBS if "part" in row]


def test_container_has_the_python_of_ci():
    ci = next(job for workflow, job, _ in JOBS if workflow["name"] == "ci")
    version = ci["steps"][1]["with"]["python-version"]
    assert CONTAINER["image"] == f"python:{version}-bookworm"
