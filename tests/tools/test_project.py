"""Steps are short, edits are carried along them, commands of make work."""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers import IGNORED, NIGHTLY, edit, needs_slurm, run

from tools import steps
from tools.steps import ROOT

SCRIPT_STEPS = [step for step in steps.ALL if step.file.endswith(".py")]


@pytest.mark.parametrize("step", steps.ALL + steps.PORTS)
def test_steps_are_short(step):
    """Counted by the shell's own tools, as anyone would."""
    name = Path(step.file).stem
    count = f"diff -U0 {step.base} {step.file} | grep -c '^[+-][^+-]'"
    printed = run("sh", "-c", count).stdout
    assert int(printed) == steps.changed_lines(step.base, step.file)
    too_long = f"shorten it, or raise its ceiling in tools/steps.py to {printed}"
    assert int(printed) <= step.max_changed_lines, too_long
    if step in steps.STEPS:
        link = f"[{printed.strip()} changed lines](docs/{name}.md)"
        assert (ROOT / "README.md").read_text().count(link) == 1
    if step in steps.STEPS + steps.GPT + steps.PORTS:  # cog fills the tables of the others
        table = ROOT / "docs" / Path(step.file).parent / "index.md"
        rows = table.read_text().splitlines()
        section = rf"\w+\.md#[\w-]+-{name}py"  # of another step's page
        link = rf"\]\(({name}\.md|{section})\) \|"
        row = next(row for row in rows if row.startswith("|") and re.search(link, row))
        assert row.endswith(f" {printed.strip()} |"), f"write {printed.strip()} into {table}"


def test_tools_import_from_above():
    """As tools/README.md says, which lists all of them."""
    table = (ROOT / "tools" / "README.md").read_text()
    names = re.findall(r"^\| `(\w+)(?:\.py)?/?` \|", table, re.M)
    files = [*(ROOT / "tools").glob("*/**/*.py"), *(ROOT / "tools").glob("[!_]*.py")]
    tops = {path: path.relative_to(ROOT / "tools").parts[0].removesuffix(".py") for path in files}
    assert {*tops.values()} == {*names}
    for path, top in tops.items():
        imported = re.findall(r"^\s*(?:from|import) tools\.(\w+)", path.read_text(), re.M)
        assert {*imported} <= {*names[: names.index(top) + 1]}, f"{path} imports from below"


def introduction(script):
    """Returns the beginning of the help text, without the command that follows."""
    docstring = ast.get_docstring(ast.parse((ROOT / script).read_text()))
    return re.split(": |, with the same command", docstring)[0]


@pytest.mark.parametrize("step", SCRIPT_STEPS)
def test_scripts_introduce_themselves(step):
    assert introduction(step.file) != introduction(step.base)


def cascade(folder, *file):
    return run("python", "-m", "tools.chain.cascade", *file, folder=folder)


ACCESS = "    if not args.snapshot_path or not os.access("
CHECK = (ACCESS, f'    if args.total_epochs > 10**6:\n        parser.error("too many")\n{ACCESS}')


@pytest.mark.long
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


@pytest.mark.long
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


SHARD = "            yield shard or global_batch[:1]  # DDP needs a batch on every rank"
SIZE = "    sampler.global_batch_size = args.global_batch_size"
DRAWN = "drawn = self.samples_run + self.args.global_batch_size"
SCALED = "(loss * local_size / global_size * dist.get_world_size())"
OWNED = """from tools import steps
from tools.units import stored
lines = steps.diff_lines("preemptible.py", "elastic_ddp.py")
print(stored.owners(lines, stored.load()["elastic_ddp.py"]).count(None))
"""


@pytest.mark.long
def test_cascade_carries_what_quotes_the_lines(copy):
    """A fault, what two files become together, and the answer to what falls without a line."""
    unanswered = run("python", "-c", OWNED, folder=copy).stdout
    edit(copy / "elastic_ddp.py", SHARD, SHARD.replace("global_batch[", "order["))
    edit(copy / "elastic_ddp.py", SIZE, f"{SIZE} * 1")
    page = copy / "docs" / "page.md"
    page.write_text(f"The position is `{DRAWN}`.\n")
    run("git", "add", "docs", folder=copy)
    edit(copy / "elastic_ddp.py", DRAWN, f"{DRAWN} + 0")
    result = cascade(copy, "elastic_ddp.py")
    assert result.returncode == 0, result.stderr
    for name in ("tools/edits/messages.diff", "tools/compose/resolutions.diff"):
        assert not {SHARD, f"-{SHARD}", SIZE} & {*(copy / name).read_text().splitlines()}
    assert page.read_text() == f"The position is `{DRAWN} + 0`.\n"
    assert run("python", "-c", OWNED, folder=copy).stdout == unanswered
    files = ["elastic_ddp.py", "recipes/evaluate.py", "--output", "both.py"]
    result = run("python", "-m", "tools.compose", *files, folder=copy)
    assert result.returncode == 0, result.stderr
    assert f"{SIZE} * 1" in (copy / "both.py").read_text()


def test_cascade_names_what_it_cannot_carry(copy):
    """Without a file, it is about all uncommitted edits."""
    (line,) = re.findall(r".*count\(v\) <= len.*", (copy / "recipes" / "verify.py").read_text())
    (copy / "docs" / "page.md").write_text(f"\nIt says `{line.strip()}`.\n")
    run("git", "add", "docs", folder=copy)
    edit(copy / "recipes" / "verify.py", line, f"{line.replace('<=', '<')}\n        pass")
    edit(copy / "by_hand" / "ddp.py", "self.flat /= dist.", "self.flat = self.flat / dist.")
    edit(copy / "multigpu.py", "        self.sampler.set_epoch(epoch)\n", "")
    edit(copy / "elastic_ddp.py", SCALED, f"({SCALED[1:-1]} * 1)")
    result = cascade(copy)
    assert result.returncode == 1
    for line in (
        r"tools/learn/exercises.txt:\d+: 'self.flat /= .*' is not in by_hand/ddp.py",
        r"tools/edits/faults.diff:1: set_epoch is missing: not once in multigpu.py: self.sampl.*",
        r"tools/compose/resolutions.diff:\d+: write anew what elastic_ddp.py .* become: .*",
        r"docs/page.md:2: quotes a line that has changed: It says .*",
    ):
        assert re.search(f"^cascade: {line}$", result.stderr, re.MULTILINE), result.stderr


@pytest.mark.long
def test_recipe_is_begun(tmp_path):
    """What `make docs` misses is only what a person must write; tests and style accept the rest."""
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True)
    begin = ["make", "-o", ".venv/dev", "recipe", "NAME=clip", "BASE=elastic_ddp.py"]
    assert run(*begin, folder=copy).returncode == 0
    assert "recipe: give a new NAME" in run(*begin, folder=copy).stderr
    assert (copy / "recipes" / "clip.py").read_text().startswith('"""TODO: ')  # else too long
    said = run("make", "-o", ".venv/dev", "docs", folder=copy).stderr.splitlines()[:-1]
    todo = [re.match(r"docs/recipes/\w+\.md:\d+: .*TODO: ", line) for line in said]
    assert todo and all(todo), said
    for page in (copy / "docs" / "recipes").glob("*.md"):
        page.write_text(page.read_text().replace("TODO: ", ""))
    result = run("python", "-m", "tools.pages.check_docs", folder=copy)
    assert result.returncode == 0, result.stderr
    result = run("pytest", "-n", "0", "-k", "clip.py or test_clip", "tests", folder=copy)
    assert result.returncode == 0, result.stdout
    assert "run: python -m tools.units recipes/clip.py; then write" in result.stdout
    result = run("ruff", "check", "--output-format=concise", folder=copy)
    assert re.findall(r"^(\S+):\d+:\d+: (\w+)", result.stdout, re.MULTILINE) == [
        ("tests/recipes/test_clip.py", "FIX002")
    ]


def test_another_version_of_torch(copy):
    """Written where the number is only repeated; what is said of a version is listed."""
    (copy / "constraints.txt").write_text("torch==2.13.0\ntqdm==1\n")
    (copy / "page.md").write_text("torch 2.13.0+cpu\nA fault of torch 2.13.\n")
    run("git", "add", "constraints.txt", "page.md", folder=copy)
    make = ["make", "-f", ROOT / "Makefile", "-o", ".venv/bin/python", "torch"]
    result = run(*make, "VERSION=2.14.1", folder=copy)
    assert result.returncode == 0, result.stderr
    assert (copy / "constraints.txt").read_text() == "torch==2.14.1\ntqdm==1\n"
    assert (copy / "page.md").read_text() == "torch 2.14.1+cpu\nA fault of torch 2.13.\n"
    assert "page.md:2: A fault of torch 2.13." in result.stdout
    assert run(*make, folder=copy).stderr.startswith("torch: name the version, as in: make torch")


# The targets of make, and scripts of bench/ and tools/ that no other test runs.

OLD_FILES = "-o requirements.txt -o requirements/dev.txt -o constraints.txt"
# What is run here, at its smallest size, and something that it prints.
COMMANDS = [
    ("make help", "make learn"),
    ("make --dry-run check STAGE=multigpu FILE=a.py", "judge.check multigpu 'a.py'"),
    ("python -m tools.edits 1", "class Trainer:"),
    pytest.param("python -m tools.formulas.scaling", "best interval", marks=pytest.mark.long),
    # Which figures come out depends on the machine.
    pytest.param("python -m bench.overlap", "buckets: ", marks=[NIGHTLY, needs_slurm]),
    pytest.param("python -m bench.memory_peaks", "predicted", marks=NIGHTLY),
    pytest.param(
        "make bench BENCH_ARGS='--rounds 1 --epochs 1'", "x raw DDP", marks=pytest.mark.long
    ),
    pytest.param("make chaos FAULTS=1 SEED=65", ": good", marks=[NIGHTLY, needs_slurm]),
]


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_command(command, output):
    # The environment is that of this test, and stays as it is.
    command = command.replace("make ", f"make {OLD_FILES} ")
    result = run(*shlex.split(command))
    assert result.returncode == 0, result.stdout + result.stderr
    assert output in result.stdout
