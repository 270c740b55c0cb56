"""tests/faults/every_kill.py finds no point of a run at which a kill costs a sample; and would."""

import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import LONG, first, run

from tests.faults import every_kill
from tests.faults.chaos import ChaosRun
from tools.steps import ROOT

TMP = ("tmp_path = f", "tmp_path = path or f")  # writes in place
FSYNC = ("os.fsync(", "print(")
POSITION = ("self.samples_run = snapshot", "snapshot")


@pytest.mark.parametrize(
    ("file", "old_and_new", "at", "wrong"),
    first(
        1,
        [
            ("resumable.py", TMP, "all:0:write*:100", "cannot load"),
            ("resumable.py", ("", ""), "rank:0:* node0/snapshot.pt.tmp:2", ""),
            ("resumable.py", POSITION, "rank:0:step:5", "it resumes from (1, 0)"),
            ("resumable.py", ("", ""), "power*:0:log:3", ""),
            ("resumable.py", FSYNC, "power:0:log:3", "cannot load"),
            ("gpt/async_save.py", ("", ""), "all:0:open*_000000000008/.metadata.tmp:1", ""),
            ("recipes/monitor.py", ("", ""), "rank:?:step:5", ""),  # of both ranks
            (
                "recipes/monitor.py",
                ("self.epochs_run = s", "s"),
                "rank:0:step:5",
                "resumes from (0,",
            ),
        ],
        LONG,
    ),
)
def test_kills(tmp_path, file, old_and_new, at, wrong):
    script = tmp_path / Path(file).name
    script.write_text((ROOT / file).read_text().replace(*old_and_new))
    expected = every_kill.undisturbed(str(script))
    trials = every_kill.trials_of(str(script), expected.points)
    names = fnmatch.filter(trials, at)
    assert names
    for name in names:
        result = every_kill.try_kills(trials[name], str(script), expected, tmp_path)
        assert wrong in result if wrong else result == "", (name, result)


@pytest.mark.parametrize("start, good", [(2, False), (3, True)])
def test_chaos_sees_a_loss(start, good):
    """An older snapshot is resumed from, though the run then comes further than the one lost."""
    lives = [range(1, 4), range(start, 6)]
    saved = [[f"epoch {n} | loss 1 | saved a.pt\n" for n in life] for life in lives]
    log = "".join("epochs done\n" + "".join(life) for life in saved)
    assert ChaosRun.never_older(SimpleNamespace(read=lambda: log)) == good


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("multigpu.py", "is not started by torchrun"),
        ("gpt/ask.py", "has no trainer"),
        ("a", "is no"),
    ],
)
def test_files_that_are_not_taken(file, reason):
    result = run("python", "-m", "tests.faults.every_kill", file)
    assert result.returncode == 2 and f"{file} {reason}" in result.stderr.splitlines()[-1]
