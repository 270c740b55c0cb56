"""The command of tools.compose: what it refuses, marks or warns of; own scripts; upgrades."""

import itertools
import re
import shlex
import sys

import pytest
from helpers import LONG, SIGNAL, curves, edit, first, patch, run, weights_diff

from tools.compose.compose import compose, read_old
from tools.steps import ROOT, STAGES


def compose_in(folder, arguments):
    return run(sys.executable, "-m", "tools.compose", *shlex.split(arguments.format(folder=folder)))


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("multinode.py", "name two files or more"),
        ("evaluate.py preemptible.py", "not of the series: do you mean recipes/evaluate.py?"),
        ("recipes/fsdp.py no.py", "no.py is not of the series: if it is yours, name it first"),
        ("recipes/fsdp.py recipes/fsdp.py", "recipes/fsdp.py is named twice"),
        ("multinode.py recipes/fsdp.py", "recipes/fsdp.py contains multinode.py, on which it"),
        ("elastic_ddp.py gpt/fsdp.py", "elastic_ddp.py and gpt/fsdp.py are of different series"),
        ("recipes/fsdp.py recipes/verify.py", "go together: the ranks hold different shards"),
        ("recipes/evaluate.py preemptible.py --check", "make check cannot judge recipes"),
        ("recipes/evaluate.py recipes/verify.py -o {folder} --force", "is a folder, or one of the"),
        ("recipes/evaluate.py recipes/verify.py -o {folder}/bad.py", "bad.py exists: name another"),
        ("recipes/evaluate.py recipes/verify.py -o {folder}/no/x.py", "No such file or directory"),
        ("multinode.py recipes/fsdp.py --base multinode.py", "multinode.py belongs to the series"),
        ("{folder}/bad.py recipes/fsdp.py --base no.py", "--base no.py is not of the series"),
        ("{folder}/no.py recipes/fsdp.py --base multinode.py", "there is no file "),
        ("{folder}/bad.py recipes/fsdp.py --base multinode.py", "bad.py: '(' was never closed"),
        ("{folder}/zip.py recipes/fsdp.py --base multinode.py", "zip.py: 'utf-8' codec can't deco"),
        ("{folder}/bad.py --upgrade --base multinode.py", "takes one script of yours, and --base"),
        ("{folder}/bad.py --upgrade --base multinode.py@no", "git knows no such revision, nor"),
        ("{folder}/bad.py --upgrade --base multinode.py@HEAD", "bad.py: '(' was never closed"),
        ("{folder}/bad.py --base multinode.py@HEAD", "multinode.py@HEAD is not of the series"),
        # What is in the base counts as well.
        ("{folder}/bad.py recipes/verify.py --base recipes/fsdp.py", "do not go together: the ran"),
    ],
)
def test_bad_choice(tmp_path, arguments, error):
    (tmp_path / "bad.py").write_text("print(\n")
    (tmp_path / "zip.py").write_bytes(b"PK\xff")
    before = sorted(tmp_path.rglob("*"))
    if " -o " not in arguments:
        arguments += " -o {folder}/out.py"
    result = compose_in(tmp_path, arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("compose: ") and error in line
    assert sorted(tmp_path.rglob("*")) == before


def conflict_of(text):
    """Returns both sides of the only conflict, with what they replace, between their names."""
    marked = r"^<<<<<<< (.*?)\n(.*?)^\|{7} before\n(.*?)^=======\n(.*?)^>>>>>>> (.*?)\n"
    (found,) = re.findall(marked, text, re.DOTALL | re.MULTILINE)
    return found


CLIP = "        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)"


@pytest.mark.parametrize("base", ["multinode.py", "elastic_ddp.py"])
def test_conflict(tmp_path, base):
    """Marked as git marks it; --force replaces the file; lines end as they did in one's own.

    That resolutions.diff settles elastic_ddp.py's part of it does not hide the rest.
    """
    text = (ROOT / base).read_text()
    text = text.replace("        self.optimizer.step()", f"{CLIP}\n        self.optimizer.step()")
    (tmp_path / "own.py").write_text(text, newline="\r\n")
    arguments = f"{tmp_path}/own.py recipes/mixed_precision.py --base {base} -o {tmp_path}/out.py"
    for more in ("", " --force"):
        result = compose_in(tmp_path, arguments + more)
        assert result.returncode == 1 and "out.py: has conflicts, marked as git" in result.stderr
    output = (tmp_path / "out.py").read_bytes().decode()
    assert output.count("\n") == output.count("\r\n")
    first_name, ours, old, theirs, second_name = conflict_of(output.replace("\r\n", "\n"))
    assert first_name.endswith("own.py") and second_name.endswith("mixed_precision.py")
    assert CLIP in ours and ours in text
    assert old in (ROOT / "multinode.py").read_text()
    assert theirs in (ROOT / "recipes" / "mixed_precision.py").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "parts, checks",
    first(
        1,
        [
            ("preemptible.py recipes/tensorboard_logging.py", 20),
            ("gpt/async_save.py gpt/tensor_parallel.py", 8),
        ],
    ),
)
def test_checked(tmp_path, parts, checks):
    result = compose_in(tmp_path, f"{parts} -o {{folder}}/out.py --check")
    assert result.returncode == 0, result.stdout
    assert f"proven: {' + '.join(parts.split())}" in result.stdout
    assert "FAIL" not in result.stdout and result.stdout.count("  ok  ") == checks


OWN_MODEL = """class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))


"""


def with_own_model(text):
    """Returns a script with another model, data and optimizer."""
    text = re.sub(r"class ToyModel.*?\n\n\n", OWN_MODEL, text, flags=re.DOTALL)
    # Three lines in a row, between which evaluate.py adds some.
    text = text.replace("ToyModel", "MyModel").replace("ToyDataset(2048)", "ToyDataset(1600)")
    sgd = "SGD(model.parameters(), lr=0.01, momentum=0.9)"
    assert sgd in text
    return text.replace(sgd, "AdamW(model.parameters())")


def test_own_script(shell):
    """With another model, data and optimizer, it takes three recipes and two stages in turn."""
    (shell.folder / "0.py").write_text(with_own_model((ROOT / "multinode.py").read_text()))
    bases = {
        "recipes/evaluate.py": "multinode.py",
        "recipes/tensorboard_logging.py": "multinode.py",
        "resumable.py": "multinode.py",
        "preemptible.py": "resumable.py",
        "recipes/profiler.py": "preemptible.py",
    }
    for n, (part, base) in enumerate(bases.items()):
        arguments = f"{{folder}}/{n}.py {part} --base {base} -o {{folder}}/{n + 1}.py"
        result = compose_in(shell.folder, arguments)
        assert result.returncode == 0, result.stderr
    composed = (shell.folder / "5.py").read_text()
    assert OWN_MODEL in composed and "(1600)" in composed and "AdamW(" in composed
    script = patch(shell.folder, shell.folder / "5.py", SIGNAL, "signalled.py")
    command = f"{script} 2 1 --batch_size 32"
    shell.ranks(command, 2, SIGNAL="15", SIGNAL_AT="1 320").fails("stopped by a signal")
    output = shell.ranks(command, 2).succeeds()
    assert "val loss" in output and curves(shell.folder / "snapshot.pt.logs")
    # It has trained as on one rank with the first recipe alone.
    shell.ranks(f"{shell.folder}/1.py 2 1 --batch_size 64 --snapshot_path one").succeeds()
    assert weights_diff(shell, "snapshot.pt", "one") < 1e-5


@pytest.mark.parametrize("order", first(1, [*map("".join, itertools.permutations("012"))], LONG))
def test_own_script_in_each_order(tmp_path, order):
    """Three that change the same lines, taken one after another, have the lines of all at once."""
    parts = ["elastic_ddp.py", "recipes/mixed_precision.py", "recipes/gradient_accumulation.py"]
    (tmp_path / "0.py").write_text(with_own_model((ROOT / "multinode.py").read_text()))
    base = "multinode.py"
    for n, part in enumerate(parts[int(index)] for index in order):
        arguments = f"{{folder}}/{n}.py {part} --base {base} -o {{folder}}/{n + 1}.py"
        result = compose_in(tmp_path, arguments)
        assert result.returncode == 0, result.stderr
        base = part if part in STAGES else base
    composed = (tmp_path / "3.py").read_text()
    expected = "\n".join(line for line, _ in compose(parts, "3.py"))
    step = re.search(r"    def _run_batch.*?\n\n", expected, re.DOTALL)[0]
    assert step in composed and OWN_MODEL in composed


# What changes in multinode.py after a copy was made.
SINCE = [
    (
        "        self.loss_fn = loss_fn\n",
        "        self.loss_fn = loss_fn\n        self.name = 'b'\n",
    ),
    ("lower the learning rate?", "is the learning rate too high?"),
    ("        progress.set_postfix(loss", "        progress.set_postfix(mean_loss"),
]


def commit(copy):
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    assert run("git", "add", ".", folder=copy).returncode == 0
    assert run(*git, "commit", "-qm", "a change", folder=copy).returncode == 0


def upgrade(copy, base, own):
    """Returns what the command says of a copy, and the code that it writes."""
    (copy / "own.py").write_text(own)
    arguments = ["own.py", "--upgrade", "--base", base, "--force"]
    result = run(sys.executable, "-m", "tools.compose", *arguments, folder=copy)
    return result, code_of((copy / "own_upgraded.py").read_text())


def code_of(text):
    """Returns a script without its docstring."""
    return text.partition("\nimport")[2]


@pytest.mark.parametrize("version", ["HEAD", "1.0"])
def test_upgrade(copy, version):
    """A copy of an old version gets what has changed since, and keeps what was changed in it."""
    (copy / "CHANGELOG.md").write_text("# Changes\n\n## 1.0 (today)\n")
    commit(copy)
    own = with_own_model((copy / "multinode.py").read_text())
    for old, new in SINCE:
        edit(copy / "multinode.py", old, new)
    result, upgraded = upgrade(copy, f"multinode.py@{version}", own)
    assert result.returncode == 0, result.stderr
    assert upgraded == code_of(with_own_model((copy / "multinode.py").read_text()))


@pytest.mark.parametrize("file", ["multinode.py", "elastic_ddp.py"])
def test_upgrade_of_version_1_1(tmp_path, file):
    """A copy of it with a model of one's own becomes today's file with that model."""
    try:
        text = read_old(f"{file}@1.1")
    except SystemExit:
        pytest.skip("needs the history of this repository")
    (tmp_path / "own.py").write_text(with_own_model(text))
    result = compose_in(tmp_path, f"{{folder}}/own.py --upgrade --base {file}@1.1")
    assert result.returncode == 0, result.stderr
    upgraded = code_of((tmp_path / "own_upgraded.py").read_text())
    assert upgraded == code_of(with_own_model((ROOT / file).read_text()))


def test_upgrade_of_an_older_copy(copy):
    """It is noticed that not the named version was copied, which has nothing to bring."""
    own = with_own_model((copy / "multinode.py").read_text())
    result, _ = upgrade(copy, "multinode.py@HEAD", own)
    assert "nearer" not in result.stdout
    edit(copy / "multinode.py", *SINCE[1])
    commit(copy)
    result, _ = upgrade(copy, "multinode.py@HEAD", own)
    first = run("git", "rev-list", "--max-parents=0", "--abbrev-commit", "HEAD", folder=copy).stdout
    assert "multinode.py has 0 changed lines since HEAD" in result.stdout
    nearer = "own.py is nearer to another version: is it a copy of multinode.py@"
    assert f"{nearer}{first.strip()}?" in result.stdout


def test_upgrade_in_conflict(copy):
    """Where both have changed a line, both texts stand in the script."""
    line = "torch.manual_seed(args.seed)"
    own = (copy / "multinode.py").read_text().replace(line, "torch.manual_seed(1)")
    edit(copy / "multinode.py", line, "torch.manual_seed(2)")
    edit(copy / "multinode.py", "import time\n", "")  # which a line of one's own needs
    edit(copy / "multinode.py", "time.sleep(0.1)", "pass")
    own = own.replace(
        "def _log(", "def log_time(self):\n        print(time.time())\n\n    def _log("
    )
    result, upgraded = upgrade(copy, "multinode.py@HEAD", own)
    assert result.returncode == 1 and "_upgraded.py: has conflicts, marked as" in result.stderr
    assert "Undefined name `time`" in result.stderr
    _, ours, old, theirs, name = conflict_of(upgraded)
    assert line in old and name == "multinode.py"
    assert "manual_seed(1)" in ours and "manual_seed(2)" in theirs


def test_side_of_a_conflict_that_is_no_script(copy):
    """One's own brackets close what only the other side has not opened."""
    line = "    train_loader = DataLoader("
    end = '        pin_memory=device.type == "cuda",\n    )'
    own = (copy / "multinode.py").read_text().replace(line, "    train_loader = wrap([DataLoader(")
    assert own.count(end) == 1
    edit(copy / "multinode.py", line, "    train_loader = torch.utils.data.DataLoader(")
    result, _ = upgrade(copy, "multinode.py@HEAD", own.replace(end, f"{end}])"))
    assert result.returncode == 1 and "has conflicts, marked as git" in result.stderr
    assert "Traceback" not in result.stderr
