"""Steps are short, edits are carried along them, all files save alike, commands of make work."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers import NIGHTLY, edit, needs_slurm, run, snippet

from tools import steps
from tools.steps import ROOT

RECIPES = steps.RECIPES + steps.LATER_RECIPES
SCRIPT_STEPS = steps.STEPS + RECIPES + steps.BY_HAND + steps.GPT


@pytest.mark.parametrize("step", steps.ALL + steps.PORTS, ids=lambda step: step.file)
def test_steps_are_short(step):
    """Counted by the shell's own tools, as anyone would."""
    page = f"{Path(step.file).stem}.md"
    count = f"diff -U0 {step.base} {step.file} | grep -c '^[+-][^+-]'"
    printed = run("sh", "-c", count).stdout
    assert int(printed) == steps.changed_lines(step.base, step.file)
    too_long = f"shorten it, or raise its ceiling in tools/steps.py to {printed}"
    assert int(printed) <= step.max_changed_lines, too_long
    tables = []
    if step in steps.STEPS:
        tables = [("docs/index.md", f"]({page}) |")]
        link = f"[{printed.strip()} changed lines](docs/{page})"
        assert (ROOT / "README.md").read_text().count(link) == 1
    elif step in RECIPES + steps.BY_HAND:
        table = f"docs/{Path(step.file).parent}/index.md"
        tables = [(table, f"[`{Path(step.file).name}`](")]
    elif step in steps.GPT:
        tables = [("docs/gpt/index.md", f"]({page}) |")]
    elif step in steps.PORTS:
        tables = [("docs/ports/index.md", f"]({page}) |")]
    for table, first_cell in tables:
        rows = (ROOT / table).read_text().splitlines()
        row = next(row for row in rows if row.startswith("|") and first_cell in row)
        assert row.endswith(f" {printed.strip()} |"), f"write {printed.strip()} into {table}"


def introduction(script):
    """Returns the beginning of the help text, without the command that follows."""
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text()))
    return re.split(": |, with the same command", docstring)[0]


@pytest.mark.parametrize(
    "step", [s for s in steps.ALL if s.file.endswith(".py")], ids=lambda step: step.file
)
def test_scripts_introduce_themselves(step):
    assert introduction(step.file) != introduction(step.base)


def cascade(folder, file):
    return run("python", "-m", "tools.chain.cascade", file, folder=folder)


ACCESS = "    if not args.snapshot_path or not os.access("
CHECK = (ACCESS, f'    if args.total_epochs > 10**6:\n        parser.error("too many")\n{ACCESS}')


def test_cascade_carries_an_edit_to_every_stage(copy):
    edit(copy / "singlegpu.py", "default=50", "default=60")
    # A check where later files have theirs, which all stay.
    edit(copy / "singlegpu.py", *CHECK)
    result = cascade(copy, "singlegpu.py")
    assert result.returncode == 0, result.stderr
    scripts = [(copy / step.file).read_text() for step in SCRIPT_STEPS]
    assert all("default=60" in script and script.count(CHECK[1]) == 1 for script in scripts)
    after = result.stdout.partition("after:\n")[2]
    assert [line.strip() for line in after.splitlines()] == steps.sizes()
    assert run("python", "tools/steps.py", folder=copy).stdout.splitlines() == steps.sizes()
    edit(copy / "slurm" / "singlegpu.sbatch", "--account=my_project", "--account=ours")
    assert cascade(copy, "slurm/singlegpu.sbatch").returncode == 0
    assert all("--account=ours" in (copy / step.file).read_text() for step in steps.JOB_STEPS)


def test_cascade_goes_round_a_conflict(copy):
    """Scripts that have changed the edited line are named; the others have it."""
    edit(copy / "singlegpu.py", "lr=0.01", "lr=0.02")
    result = cascade(copy, "singlegpu.py")
    assert result.returncode == 1
    found = re.findall(r"cascade: conflict in (\S+): resolve the marked lines(.*)", result.stderr)
    conflicts = dict(found)
    assert {"gpt/gpt.py", "by_hand/zero.py"} <= conflicts.keys()
    assert conflicts["gpt/gpt.py"] == ", then run: make cascade FROM=gpt/gpt.py"
    assert "<<<<<<< gpt/gpt.py" in (copy / "gpt/gpt.py").read_text()
    left_out = [*conflicts]
    for step in SCRIPT_STEPS:
        if step.base in left_out:
            left_out.append(step.file)
    scripts = [copy / step.file for step in SCRIPT_STEPS if step.file not in left_out]
    assert all("lr=0.02" in script.read_text() for script in scripts)
    assert "gpt/gpt.py still has conflict marks" in cascade(copy, "preemptible.py").stderr
    before = (copy / "gpt/schedule.py").read_text()
    assert "gpt/gpt.py has conflict marks" in cascade(copy, "gpt/gpt.py").stderr
    assert (copy / "gpt/schedule.py").read_text() == before


def test_cascade_names_stale_resolutions(copy):
    edit(copy / "recipes" / "evaluate.py", "would repeat some", "repeats some")
    result = cascade(copy, "recipes/evaluate.py")
    assert result.returncode == 1
    stale = (
        "recipes/evaluate.py + recipes/fsdp.py",
        "recipes/save_after_failure.py + recipes/evaluate.py",
    )
    said = [line.partition("write anew what ")[2] for line in result.stderr.splitlines()]
    assert sorted(said) == [f"{files} become: they have changed" for files in stale]


@pytest.mark.parametrize("name", ["", "nosuch.py", "by_hand/regroup.py"])
def test_cascade_of_nothing(copy, name):
    result = cascade(copy, name)
    assert result.returncode == 1
    assert result.stderr.startswith("cascade: ")
    assert "Traceback" not in result.stderr


# What shows only after a power cut, on real GPUs or in a job: read in the sources.

NAMES = ["singlegpu.py", *(step.file for step in steps.ALL if step.file.endswith(".py"))]
SOURCES = {name: (ROOT / name).read_text() for name in NAMES}
JOB_FILES = ["slurm/singlegpu.sbatch", *(step.file for step in steps.JOB_STEPS)]
SYNC_AND_REPLACE = (
    r"file\.flush\(\)\n +os\.fsync\(file\.fileno\(\)\)\n.+\n.+\n +os\.replace\(tmp_path, path\)"
)


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.save(" in SOURCES[name]])
def test_save(name):
    """A snapshot has reached the disk before it replaces the one before it."""
    assert re.search(SYNC_AND_REPLACE, SOURCES[name])


@pytest.mark.parametrize("name", [name for name in NAMES if "torch.load(" in SOURCES[name]])
def test_load(name):
    """No rank loads onto the GPU of rank 0; no file runs code, whichever version torch has."""
    for arguments in re.findall(r"torch\.load\((.*)\)", SOURCES[name]):
        assert re.search(r', (map_location=)?"cpu"', arguments)
        assert ", weights_only=True" in arguments


# Runs the job file $0, submitted with --export=NONE, and prints what srun gets.
PRETEND_SLURM = """
export SLURM_EXPORT_ENV=NONE SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=2
source() { [[ $1 == .venv/* ]] || . "$1"; }
module() { echo "module $*"; }
scontrol() { echo node1; }
srun() { printf '%s\\n' "network $NCCL_SOCKET_IFNAME" "$@" "export=$SLURM_EXPORT_ENV"; }
. "$0"
"""


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file(name):
    """Slurm starts the job with all nodes; after a failure, it ends all or, elastic, none."""
    lines = run("bash", "-c", PRETEND_SLURM, ROOT / name, "50", "10").stdout.splitlines()
    assert lines[-3:] == ["50", "10", "export="]
    text = (ROOT / name).read_text()
    if "#SBATCH --nodes=1\n" not in text:
        assert "#SBATCH --wait-all-nodes=1\n" in text
        if "elastic" in name:
            assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=60"} <= set(lines)
        else:
            assert "--kill-on-bad-exit=1" in lines


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_file_alone(name, tmp_path):
    """What a copied job file lacks is said as it starts, in a line."""
    requeues = "slurm/requeue.sh" in (ROOT / name).read_text()
    for missing in ["requeue.sh", ".venv"] if requeues else [".venv"]:
        result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
        assert result.returncode == 1 and result.stdout == ""
        assert missing in result.stderr and result.stderr.count("\n") == 1
        (tmp_path / "slurm").mkdir(exist_ok=True)
        shutil.copy(ROOT / "slurm" / "requeue.sh", tmp_path / "slurm")
    # Of docs/containers.md: in place of activating .venv.
    (tmp_path / "slurm" / "site.sh").write_text(snippet("containers.md", "module load"))
    result = run("bash", "-c", PRETEND_SLURM, ROOT / name, folder=tmp_path)
    assert re.match(r"module load .*\n(.*\n)*network ib0\n", result.stdout), result


# The targets of make, and scripts of bench/ and tools/ that no other test runs.

OLD_FILES = "-o requirements.txt -o requirements-dev.txt -o constraints.txt"
# What is run here, at its smallest size, and something that it prints.
COMMANDS = [
    ("make help", "make cascade"),
    ("make lint", "ruff format --check"),
    ("make --dry-run check STAGE=multigpu FILE=a.py", "judge.check multigpu 'a.py'"),
    ("python -m tools.chain.run --help", "usage: run.py"),
    ("python -m tools.judge.faults 1", "class Trainer:"),
    ("python -m tools.formulas.scaling", "best interval"),
    pytest.param("python -m bench.recovery_time 1", "regroup.py: ", marks=NIGHTLY),
    pytest.param(
        "make bench BENCH_ARGS='--rounds 1 --epochs 1'",
        "x raw DDP",
        marks=pytest.mark.long,
    ),
    pytest.param("make chaos FAULTS=1 SEED=65", ": good", marks=[pytest.mark.long, needs_slurm]),
]


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_command(command, output):
    # The environment is that of this test, and stays as it is.
    command = command.replace("make ", f"make {OLD_FILES} ")
    result = run(*shlex.split(command))
    assert result.returncode == 0, result.stdout + result.stderr
    assert output in result.stdout
