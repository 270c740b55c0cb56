"""rankcheck on scripts of the series; its own tests are in packages/rankcheck/tests."""

import ast

import pytest
from helpers import fences, first, run

from tools.steps import ROOT

PACKAGE = ROOT / "packages" / "rankcheck"


def test_the_package_knows_nothing_of_the_series():
    """It could leave tomorrow: it imports nothing of what surrounds it."""
    ours = {path.stem for path in ROOT.iterdir()} - {"packages"}
    for path in [*PACKAGE.glob("src/**/*.py"), *PACKAGE.glob("tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & ours, path


@pytest.mark.long
def test_example(tmp_path):
    """The script on docs/audit.md has the faults that the page shows."""
    (script,), (report, *_) = (fences("audit.md", language) for language in ("python", "text"))
    (tmp_path / "my_train.py").write_text(script)
    result = run("rankcheck", "my_train.py", folder=tmp_path)
    assert result.returncode == 1 and result.stdout == report


@pytest.mark.long
def test_right_stage(tmp_path):
    result = run("rankcheck", ROOT / "multigpu_torchrun.py", "3", "1", folder=tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.long
@pytest.mark.parametrize("port", first(1, ["gan", "images", "recurrent", "text", "vae"]))
def test_port(tmp_path, port):
    result = run("rankcheck", "--empty", "-v", ROOT / "ports" / f"{port}.py", folder=tmp_path)
    for text in ("0 errors, 0 warnings", "trains as without a kill", "ok: SIGTERM in step"):
        assert text in result.stdout, result.stdout + result.stderr
