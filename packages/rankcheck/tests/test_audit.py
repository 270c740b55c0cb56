"""rankcheck finds the faults of faults.txt, and none in right scripts."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import rankcheck
from helpers import audit, by_day, run_rankcheck
from rankcheck.launch.jobs import Shell
from rankcheck.questions.restarts import resume

SCRIPTS = Path(rankcheck.__file__).parent / "rules" / "scripts"
OTHERS = Path(__file__).parent / "scripts" / "right"
_, *EDITS = Path(__file__).with_name("faults.txt").read_text().splitlines()
RIGHT = [path.name for path in sorted(SCRIPTS.glob("*.py"))]


@pytest.mark.parametrize("edit", by_day(1, EDITS))
def test_fault(tmp_path, edit):
    rule, script, old, new, line, sentence = edit.split(" | ")
    source = (SCRIPTS / f"{script}.py").read_text()
    assert source.count(old) == 1
    source = source.replace(old, new)
    (tmp_path / "faulty.py").write_text(source)
    (number,) = (n for n, text in enumerate(source.splitlines(), 1) if line in text)
    found = audit(tmp_path, tmp_path / "faulty.py")
    said = {(f.rule, f.place) for f in found if sentence in f.text and f.rule}
    assert said == {(rule, f"{tmp_path}/faulty.py:{number}")}, found
    assert not [f for f in found if "please report" in f.text]


def test_cause_is_told():
    """A rank cannot load; the other's collective, which fails because of that, is noted first."""
    errors = ["RuntimeError: Connection closed by peer", "ValueError: another model's"]
    events = [{"error": error, "rank": rank} for rank, error in enumerate(errors)]
    runs = [SimpleNamespace(steps=[], events=events, home=Path()), SimpleNamespace(steps=[[]])]
    args = SimpleNamespace(resume="")
    facts = SimpleNamespace(whole_run=lambda: runs[1], rerun=lambda *_, **__: runs.pop(), args=args)
    (finding,) = resume(facts, {"place": ""}, 3)
    assert finding.text.endswith(f"started again, it makes no step: {errors[1]}")


@pytest.mark.parametrize("script", by_day(1, RIGHT))
def test_right_script(tmp_path, script):
    """It has modules of its own, with names that modules of rankcheck's have."""
    modules = Path(rankcheck.__file__).parent.rglob("[a-z]*.py")
    names = [path.stem for path in modules if path.parent != SCRIPTS]
    for name in names:
        (tmp_path / f"{name}.py").write_text("OWN = True")
    imports = "".join(f"from {name} import OWN\n" for name in {*names} - {"__init__"})
    (tmp_path / script).write_text(imports + (SCRIPTS / script).read_text())
    found = audit(tmp_path, tmp_path / script)
    assert {f.text for f in found if f.rule} <= {
        "at SIGTERM, nothing is saved",
        "each rank evaluates all 16 samples: split them, and add up",
    }


# What an expert would also say of right scripts.
SAID = {
    "dropout": ["last.pth is renamed without fsync"],
    "ema": ["the optimizer's state is not saved", "begins from scratch"],
    "parts_of_a_batch": ["writes over a snapshot"],
    "stages_of_a_model": [
        "before the first step, the ranks have different weights: right only if",
        "killed in step 4 and started again, it begins from scratch",
        "writes over a snapshot",
    ],
    "stateful_lstm": ["each epoch has the same order: the samples are not shuffled"],
    "warm_up": [
        "killed in step 10 and started again, it makes no step: it exits: model.pt",
        "model.pt is renamed without fsync",
        "the gradients of 8 samples are cleared",
    ],
    "diloco": ["it saves only at its end"],
    "curriculum": ["each epoch has the same order: the samples are not shuffled"],
    "one_function": ["draws different random numbers in a step"],
    "one_list_twice": ["each epoch has the same order: the samples are not shuffled"],
    "gan": ["the optimizer's state is not saved", "begins from scratch"],
    "spawned_ddp": ["it always takes port 12355", "it saves only at its end"],
    "rank_folders": ["is renamed without fsync"] * 4,
    "zero": ["zero.pt is renamed without fsync"],
}
STYLES = [path.stem for path in sorted(OTHERS.glob("*.py"), reverse=True)]


@pytest.mark.parametrize("name", by_day(1, STYLES))
def test_right_script_in_another_style(tmp_path, name):
    if name == "accelerated":
        pytest.importorskip("accelerate")
    found = audit(tmp_path, OTHERS / f"{name}.py")
    assert not [f for f in found if f.level == "error" or "please report" in f.text]
    stops = any(f.level == "ok" and f.text.startswith("SIGTERM") for f in found)
    assert not stops or "signal" in (OTHERS / f"{name}.py").read_text()
    said = [f.text for f in found if f.level == "warning" and not f.text.startswith("at SIGTERM")]
    expected = SAID.get(name, [])
    assert len(said) == len(expected), said
    assert all(text in one for one, text in zip(sorted(said), sorted(expected), strict=True)), said


@pytest.mark.long
@pytest.mark.parametrize(
    "hook",
    by_day(1, ["witness.details.product", "witness.details.describe_state", "witness.note_save"]),
)
def test_error_of_the_audit_is_not_the_scripts(tmp_path, hook):
    module = f"rankcheck.{hook.rpartition('.')[0]}"
    source = (SCRIPTS / "functions.py").read_text()
    (tmp_path / "hooked.py").write_text(f"import {module}\nrankcheck.{hook} = None\n{source}")
    result = run_rankcheck("-v", tmp_path / "hooked.py")
    assert result.returncode == 3 and " error  " not in result.stdout, result.stdout
    said = " ".join(result.stdout.split())
    assert re.search(r"not seen: .*: the audit failed in .*py:.*please report it", said), said


@pytest.mark.long
def test_what_is_saved_elsewhere_is_not_risked(tmp_path):
    source = (SCRIPTS / "functions.py").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "saves.py").write_text(source.replace('"last.', f'"{tmp_path}/runs/last.'))
    kill = "how it survives a kill: it saves to "
    assert any(f.text.startswith(kill) for f in audit(tmp_path, tmp_path / "saves.py"))
    assert [*tmp_path.glob("first*")] and not [*tmp_path.glob("killed*")]


@pytest.mark.long
def test_ranks_differ_as_in_life(tmp_path):
    """The hashes of two ranks differ, and are exchanged at a restart; so do random numbers."""
    script = tmp_path / "prints.py"
    script.write_text("import numpy, os; print(os.environ['RANK'], hash('a'), numpy.random.rand())")
    shell = Shell(tmp_path, as_in_life=True)
    runs = []
    for _ in range(2):
        job = shell.ranks_on([tmp_path] * 3, str(script))
        assert job.wait() == 0, job.output
        runs.append(job.output.splitlines())
    lines = [[line.split() for line in sorted(run)] for run in runs]
    first, again = ([hashed for _, hashed, _ in run] for run in lines)
    assert first[0] == first[2] == again[1] != first[1] == again[0]
    assert len({number for run in lines for *_, number in run}) == 6
    shell.end_all()


@pytest.mark.parametrize(
    "line, message",
    by_day(
        1,
        [
            ("import nosuch", "No module named 'nosuch'"),
            ("open('nosuch')", "No such file or directory: 'nosuch'"),  # through a hook
            ("import torch; torch.ones(2) @ torch.ones(3)", "inconsistent tensor size"),
        ],
    ),
)
def test_script_that_fails(tmp_path, line, message):
    (tmp_path / "breaks.py").write_text(line)
    result = run_rankcheck(tmp_path / "breaks.py")
    assert result.returncode == 2
    assert f"could not be run:\n| {tmp_path}/breaks.py:1: " in result.stderr
    assert message in result.stderr


FINAL = """        dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "final.pt")"""
ERRORS = [
    ("RC108", [('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass")]),  # with NCCL
    (
        "RC404",
        [('"last.tmp"', '"last.pt"'), ("        dist.barrier()", FINAL)],
    ),  # it comes too late
]


@pytest.mark.long
@pytest.mark.parametrize("rule, edits", ERRORS)
def test_no_mere_warning(tmp_path, rule, edits):
    source = (SCRIPTS / "functions.py").read_text()
    for old, new in edits:
        source = source.replace(old, new)
    (tmp_path / "faulty.py").write_text(source)
    found = audit(tmp_path, "--no-kill", "--no-replay", tmp_path / "faulty.py")
    assert [f.level for f in found if f.rule == rule] == ["error"]


@pytest.mark.long
def test_every_kill(tmp_path):
    """A default run kills while the first file is written alone."""
    script = shutil.copy(SCRIPTS / "sharded.py", tmp_path)
    result = run_rankcheck("--every-kill", "-v", script, folder=tmp_path)
    said = " ".join(result.stdout.split())
    assert result.returncode == 0 and "while it writes epoch2/.metadata.tmp, " in said, said


@pytest.mark.long
def test_resume_on_other_ranks(tmp_path):
    """On three ranks, this snapshot's epoch is another one; on one, it is right."""
    source = (SCRIPTS / "functions.py").read_text()
    skip = 'return state["epoch"] + dist.get_world_size() // 3'
    (tmp_path / "skips.py").write_text(source.replace('return state["epoch"]', skip))
    options = ["--resume-ranks", "3", "--resume-ranks", "1"]
    found = audit(tmp_path, *options, tmp_path / "skips.py")
    (warned,) = [f for f in found if f.rule == "RC515"]
    assert "on 3 ranks, it resumes after step 8: 62 samples are left out" in warned.text
    assert any("on one rank, it resumes after step 8, and trains" in f.text for f in found)


@pytest.mark.long
def test_files_that_are_not_replaced_together(tmp_path):
    source = (SCRIPTS / "functions.py").read_text()
    second = 'torch.save(optimizer.state_dict(), "adam.tmp"); os.rename("adam.tmp", "adam.pt")'
    source = source.replace('"last.pt")\n\n', f'"last.pt"); {second}\n\n', 1)
    source = source.replace('state["optimizer"])', 'torch.load("adam.pt", map_location="cpu"))')
    (tmp_path / "two_files.py").write_text(source)
    found = audit(tmp_path, tmp_path / "two_files.py")
    (warned,) = [f for f in found if f.rule == "RC513"]
    assert "while it writes adam.tmp, " in warned.text
    assert "has the weights of step 16, and another optimizer's state" in warned.text


@pytest.mark.long
@pytest.mark.parametrize("in_turn", [False, True])
def test_downloads(tmp_path, in_turn):
    """Two ranks at the same time, or one after the other."""
    package = tmp_path / "torchvision" / "datasets"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("class MNIST:\n    def download(self):\n        pass\n")
    calls = ["__import__('torchvision.datasets').datasets.MNIST().download()"]
    if in_turn:
        calls = ["if local_rank: dist.barrier()", *calls, "if not local_rank: dist.barrier()"]
    lines = "".join(f"    {call}\n" for call in calls)
    source = (SCRIPTS / "functions.py").read_text()
    (tmp_path / "loads.py").write_text(source.replace("    generator =", f"{lines}    generator ="))
    found = audit(tmp_path, "--no-kill", "--no-replay", tmp_path / "loads.py")
    text = "2 ranks download MNIST at the same time, into the same files"
    assert [f.text for f in found if f.rule == "RC115"] == ([] if in_turn else [text])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["online", "disabled"])
def test_each_rank_starts_a_run(tmp_path, mode):
    (tmp_path / "wandb.py").write_text("def init(mode):\n    pass\n")
    source = (SCRIPTS / "functions.py").read_text()
    call = f"    import wandb; wandb.init(mode='{mode}')\n    generator ="
    (tmp_path / "tracks.py").write_text(source.replace("    generator =", call))
    found = audit(tmp_path, "--no-kill", "--no-replay", tmp_path / "tracks.py")
    text = "each rank starts a run of Weights & Biases: rank 0 is enough"
    assert [f.text for f in found if f.rule == "RC708"] == ([text] if mode == "online" else [])


STARTS = """
if "RANK" not in os.environ:
    import subprocess, sys

    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    ranks = [os.environ | world | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [subprocess.Popen([sys.executable, __file__], env=rank) for rank in ranks]
    sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.long
def test_ranks_that_are_started_as_commands(tmp_path):
    source = (SCRIPTS / "functions.py").read_text().replace("set_epoch", "set_epoch if 0 else int")
    (tmp_path / "starts.py").write_text(source.replace("\nNAMES", f"{STARTS}\nNAMES"))
    options = ["--no-replay", "--no-kill", "--launcher", "python"]
    found = audit(tmp_path, *options, tmp_path / "starts.py")
    assert [f.rule for f in found if f.level == "error"] == ["RC201"], found
