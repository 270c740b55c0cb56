"""The command: what it takes, prints and returns, and what it leaves alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

import rankcheck
from helpers import run_rankcheck
from rankcheck import cli, report
from rankcheck.progress import Progress
from rankcheck.questions.facts import Finding

# One process, four steps; at {rate} 0, its weights never change.
SCRIPT = """
import os, shutil, sys, time
import torch
{more}
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), {rate})
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    {each}
{end}
"""
ONCE = ("--no-kill", "--no-replay")


def write(folder, rate=0.1, more="", each="", end="", name="train.py"):
    text = SCRIPT.format(rate=rate, more=more, each=each, end=end)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_a_wrong_command_is_told_in_a_line(tmp_path):
    write(tmp_path)
    for arguments, said in (
        (["nosuch.py"], "there is no file nosuch.py"),
        ([], "name a script"),
        (["-m", "nosuch.train"], "there is no module nosuch.train"),
        (["--ranks", "0", "train.py"], "must be 1 or more"),
        (["--ranks", "3", "--nodes", "2", "train.py"], "a multiple of --nodes"),
        (["--data", "nosuch", "train.py"], "--data nosuch: there is no such file or folder"),
        (["--ignore", "RC999", "train.py"], "RC999: no such rule"),
        (["explain", "RC999"], "there is no rule RC999"),
    ):
        result = run_rankcheck(*arguments, folder=tmp_path)
        assert result.returncode == 64 and not result.stdout
        assert said in result.stderr and result.stderr.count("\n") == 1


def test_elsewhere_than_on_linux():
    code = "import sys; sys.platform, sys.argv = 'darwin', ['rankcheck', 'train.py']"
    code += "; from rankcheck import cli; cli.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode and result.stderr.startswith("rankcheck needs Linux")
    assert result.stderr.count("\n") == 1


def test_help_needs_no_torch():
    code = "import sys; from rankcheck import cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert rankcheck.__version__ in run_rankcheck("--version").stdout


def test_a_module_finds_the_files_here_and_writes_into_a_copy(tmp_path):
    """It is started with -m, imports relatively, and is given arguments of its own."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old.txt").write_text("old")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.txt").write_text("old")
    (tmp_path / "log.txt").write_text("old")
    (tmp_path / "last.pt").write_text("a snapshot")
    more = """
from .model import NAME
assert NAME == "model" and sys.argv[1:] == ["epochs=2", "--lr", "1"]
assert open("data/old.txt").read() == "old" and not os.path.exists("last.pt")
for file in ("data/old.txt", "data/new.txt", "log.txt"):
    open(file, "a").write("new")
os.remove(b"log.txt")
assert open("data/old.txt").read() == "oldnew"
shutil.rmtree("results")
"""
    write(tmp_path, more=more, name="package/sub/train.py")
    (tmp_path / "package" / "sub" / "model.py").write_text("NAME = 'model'")
    module = ("-m", "package.sub.train", "epochs=2", "--lr", "1")
    result = run_rankcheck(*ONCE, *module, folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    first = "train.py, started as by python, on CPUs, in a copy of this folder without last.pt"
    assert result.stderr.startswith(f"{first} (--data last.pt")
    assert (tmp_path / "data" / "old.txt").read_text() == "old"
    assert (tmp_path / "log.txt").read_text() == "old"
    assert (tmp_path / "results" / "old.txt").read_text() == "old"
    assert not (tmp_path / "data" / "new.txt").exists()


def test_files_that_lie_elsewhere_are_not_written_over(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "last.pt").write_text("precious")
    write(tmp_path / "here", end=f"torch.save(model.state_dict(), {str(tmp_path / 'last.pt')!r})")
    result = run_rankcheck(*ONCE, "-v", "train.py", folder=tmp_path / "here")
    assert (tmp_path / "last.pt").read_text() == "precious"
    assert "rankcheck does not let it write over" in result.stdout
    assert result.returncode == 3, "the script could not do all that it does"


def test_what_is_ignored_and_what_fails(tmp_path):
    write(tmp_path, rate=0)
    warning = "train.py:10: RC304 warning  the weights never change: is the learning rate 0?"
    result = run_rankcheck(*ONCE, "--keep", "kept", "train.py", folder=tmp_path)
    assert result.returncode == 0 and warning in result.stdout
    assert "python" in (tmp_path / "kept" / "runs.txt").read_text()
    assert (tmp_path / "kept" / "first" / "0.log").exists()
    assert not (tmp_path / "kept" / "first" / "kept").exists()  # a link to itself
    result = run_rankcheck(*ONCE, "--fail-on", "warning", "train.py", folder=tmp_path)
    assert result.returncode == 1
    strict = (*ONCE, "--fail-on", "warning", "--ignore", "RC304")
    assert run_rankcheck(*strict, "train.py", folder=tmp_path).returncode == 0


def test_too_little_to_judge(tmp_path):
    """A gradient by torch.func: no backward pass is seen."""
    text = "import torch\ntorch.func.grad(lambda x: x.square().sum())(torch.ones(3))\n"
    text += "p = torch.nn.Parameter(torch.ones(3))\noptimizer = torch.optim.SGD([p], 0.1)\n"
    text += "p.sum().backward()\np.data.sub_(0.1 * p.grad)\n"
    (tmp_path / "train.py").write_text(text)
    result = run_rankcheck("-v", "train.py", folder=tmp_path)
    assert result.returncode == 3 and "not seen: how it trains" in result.stdout, result.stdout


def test_interrupted(tmp_path):
    """What is known is told; and nothing is left running."""
    write(tmp_path, rate=0, each="torch.save(model.state_dict(), 'last.pt')")
    command = [sys.executable, "-m", "rankcheck", "-v", "train.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path, **pipes)
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("run 2 of ") for line in lines)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "RC404 error" in output, output
    assert "not seen: the rest: SIGINT ended it in run 2" in output


def test_interrupted_before_the_first_run(tmp_path, monkeypatch, capsys):
    """While torch is imported, say: no traceback."""
    write(tmp_path)
    monkeypatch.setattr("sys.argv", ["rankcheck", str(tmp_path / "train.py")])
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)  # pytest's stay
    monkeypatch.setattr(cli, "examine", lambda args: cli.interrupt(signal.SIGINT, None))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert capsys.readouterr().err == "rankcheck: SIGINT ended it before its first run\n"


def test_from_python(tmp_path):
    write(tmp_path, rate=0)
    (finding,) = (f for f in rankcheck.audit(tmp_path / "train.py", options=ONCE) if f.rule)
    assert finding.level == "warning" and finding.place == f"{tmp_path}/train.py:10"
    (tmp_path / "train.py").write_text("import nosuch")
    with pytest.raises(rankcheck.CannotRunError, match="No module named 'nosuch'"):
        rankcheck.audit(tmp_path / "train.py")


def findings_in(folder):
    (folder / "a.py").write_text("one\ntwo  # rankcheck: ignore[RC803, RC802]\n")
    return [
        Finding("ok", "", "", "it ends"),
        Finding("warning", "RC803", f"{folder}/a.py:2", "is ignored"),
        Finding("warning", "RC804", f"{folder}/a.py:2", "is not"),
        Finding("error", "RC201", f"{folder}/a.py:1", "in step 3, it <fails>"),
        Finding("error", "RC201", f"{folder}/a.py:2", "in step 4, it <fails>"),
        Finding("unseen", "", "", "the rest"),
    ]


def test_formats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    findings = report.kept(findings_in(tmp_path), set())
    script = tmp_path / "a.py"
    text = report.as_text(findings, script, verbose=False)
    assert text.splitlines() == [
        "a.py:1: RC201 error  in step 3, it <fails> (also at 2)",
        "a.py:2: RC804 warning  is not",
        "1 error, 1 warning; 1 ok, 1 not seen (-v lists them; rankcheck explain RC201 says more)",
    ]
    assert "not seen: the rest" in report.as_text(findings, script, verbose=True)
    rows = json.loads(report.as_json(findings, script, verbose=False))["findings"]
    assert [row["rule"] for row in rows] == ["RC201", "RC804", "", ""] and rows[0]["line"] == 1
    assert report.as_github(findings, script, verbose=False).splitlines() == [
        "::error file=a.py,line=1,title=RC201::in step 3, it <fails> (also at 2)",
        "::warning file=a.py,line=2,title=RC804::is not",
    ]
    suite = ElementTree.fromstring(report.as_junit(findings, script, verbose=False))
    assert suite.attrib == {"name": "rankcheck", "tests": "4", "failures": "2", "skipped": "1"}
    assert len(suite.findall("testcase/failure")) == 2
    assert not any(f.rule == "RC804" for f in report.kept(findings_in(tmp_path), {"RC804"}))


def test_progress_on_a_terminal(monkeypatch):
    written = []
    stream = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    progress = Progress(2, stream)
    progress.begin("all ranks")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 41)
    progress.tick()
    progress.tick()
    progress.end()
    lines = "".join(written).split("\r\033[K")
    assert lines == ["", "run 1 of 2: all ranks (0 s)", "run 1 of 2: all ranks (41 s)", ""]


def test_ones_own_sitecustomize_still_runs(tmp_path):
    """rankcheck has one, for the processes that torchrun starts."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN'] = '1'")
    startup = Path(rankcheck.__file__).with_name("startup")
    environment = os.environ | {"PYTHONPATH": f"{startup}:{own}"}
    code = "import os, sys; sys.exit(os.environ.get('OWN') != '1')"
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_rules_are_listed_and_explained():
    assert "RC201  " in run_rankcheck("rules").stdout
    assert run_rankcheck("explain", "rc201").stdout.startswith("## RC201: ")
    assert "DistributedSampler" in run_rankcheck("explain", "RC201", "--script").stdout
