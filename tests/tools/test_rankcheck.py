"""rankcheck on scripts of the series; its own tests are in packages/rankcheck/tests."""

import ast

import pytest
from helpers import fences, first, run
from rankcheck.auditor import Audit
from rankcheck.cli import parse_args

from tools.steps import ROOT

PACKAGE = ROOT / "packages" / "rankcheck"


def audit(folder, script, *arguments):
    audit = Audit(parse_args(["--empty", str(script), *arguments]), folder)
    try:
        return audit.ask()
    finally:
        audit.shell.end_all()


def test_the_package_knows_nothing_of_the_series():
    """It could leave tomorrow: it imports nothing of what surrounds it."""
    ours = {path.stem for path in ROOT.iterdir()} - {"packages"}
    for path in [*PACKAGE.glob("src/**/*.py"), *PACKAGE.glob("tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & ours, path


def test_faulty_and_right(tmp_path):
    """The script on docs/audit.md has four faults; multigpu_torchrun.py has none."""
    (script,), (report, *_) = (fences("audit.md", language) for language in ("python", "text"))
    (tmp_path / "my_train.py").write_text(script)
    result = run("rankcheck", "my_train.py", folder=tmp_path)
    assert result.returncode == 1 and result.stdout == report
    result = run("rankcheck", ROOT / "multigpu_torchrun.py", "3", "1", folder=tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.long
@pytest.mark.parametrize("port", first(1, ["gan", "images", "recurrent", "text", "vae"]))
def test_port(tmp_path, port):
    found = audit(tmp_path, ROOT / "ports" / f"{port}.py")
    assert not [f for f in found if f.rule or "please report" in f.text]
    assert any("trains as without a kill" in f.text for f in found if f.level == "ok")
    assert any(f.text.startswith("SIGTERM in step") for f in found if f.level == "ok")


@pytest.mark.long
def test_data_workers_that_get_signals(tmp_path):
    """As under torchrun, which signals each rank's whole process group."""
    source = (ROOT / "preemptible.py").read_text()
    source = source.replace("=lambda worker_id: os.setsid()", "=print")
    (tmp_path / "faulty.py").write_text(source)
    found = audit(tmp_path, tmp_path / "faulty.py", "2", "1", "--num_workers=1")
    (place,) = [f.place for f in found if f.level == "error" and "worker_init_fn" in f.text]
    line = source.splitlines()[int(place.rpartition(":")[2]) - 1]
    assert "self.train_loader" in line


OPTIMIZER = "the optimizer's state, or it is not loaded"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "port, part, sentence",
    [
        ("images", "scheduler", "the learning rate is"),
        ("gan", "d_optimizer", OPTIMIZER),
        ("text", "optimizer", OPTIMIZER),
        ("vae", "optimizer", OPTIMIZER),
    ],
)
def test_port_that_forgets(tmp_path, port, part, sentence):
    source = (ROOT / "ports" / f"{port}.py").read_text()
    load = f'{part}.load_state_dict(snapshot["{part}"])'
    assert source.count(load) == 1
    (tmp_path / "faulty.py").write_text(source := source.replace(load, "pass"))
    (number,) = (n for n, line in enumerate(source.splitlines(), 1) if "torch.load(" in line)
    found = audit(tmp_path, tmp_path / "faulty.py")
    places = {f.place for f in found if sentence in f.text and f.rule}
    assert places == {f"{tmp_path}/faulty.py:{number}"}, found
