"""tools/chain/every_kill.py finds no point of a run at which a kill costs a sample; and would."""

import fnmatch

import pytest

from tools.chain import every_kill
from tools.steps import ROOT


@pytest.mark.parametrize(
    ("old", "new", "at", "wrong"),
    [
        ("", "", "rank:0:* node0/snapshot.pt.tmp:2", ""),
        ("", "", "power*:0:log:3", ""),
        ('tmp_path = f"{path}.tmp"', "tmp_path = path", "all:0:write*:100", "cannot load"),
        ("os.fsync(file.fileno())", "pass", "power:0:log:3", "cannot load"),
        ("self.samples_run = snapshot", "snapshot", "rank:0:step:5", "it resumes from (1, 0)"),
    ],
)
def test_kills(tmp_path, old, new, at, wrong):
    script = tmp_path / "resumable.py"
    script.write_text((ROOT / script.name).read_text().replace(old, new))
    expected = every_kill.undisturbed(str(script))
    trials = every_kill.trials_of(str(script), expected.points)
    names = fnmatch.filter(trials, at)
    assert names
    for name in names:
        result = every_kill.try_kills(trials[name], str(script), expected, tmp_path)
        assert wrong in result if wrong else result == "", (name, result)
