"""tools/learn: each exercise fails where it should, and the loop judges at each save."""

import ast
import math
import shutil
import subprocess
import sys

import pexpect
import pytest
from helpers import first, run
from rankcheck.launch.jobs import TIMEOUT_S, environment

from tools.judge.checks import judge, toy_task
from tools.learn.exercises import read_exercises
from tools.steps import ROOT

EXERCISES = read_exercises()
WITH_FILES = [exercise for exercise in EXERCISES if exercise.kind != "predict"]
PREDICTIONS = [exercise for exercise in EXERCISES if exercise.kind == "predict"]
TENSORS = (10 * 10, 10, 10 * 5, 5)  # of the toy


# What a plain loop, or arithmetic, says. Where neither can, it is what the pages say.
EXPECTED = {
    "steps_of_one_process": math.ceil(2048 / 48),
    "steps_of_two_ranks": 2048 // (2 * 32),
    "loss_at_the_same_batch_size": "singlegpu",  # whose batches are half as large
    "samples_of_three_ranks": 3 * math.ceil(2048 / 3),
    "steps_when_resumed_on_four_ranks": 2048 // (4 * 32),
    "epoch_after_a_kill": 7 // 4 * 4,
    "local_rank_of_rank_six": 6 % 4,
    "steps_repeated": 27 // 10 * 10 * 2 * 32,
    "samples_of_rank_two": len(range(2, 64, 3)),
    "loss_on_three_ranks": 1,
    "type_of_the_saved_weights": "float32",
    "numbers_in_the_optimizer": sum(math.ceil(size / 2) for size in TENSORS),
    "gigabytes_of_a_rank": 8 * (4 + 4) // 8,
}


def test_each_exercise_can_be_written(tmp_path):
    assert len({exercise.key for exercise in EXERCISES}) == len(EXERCISES)
    pages = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for exercise in WITH_FILES:
        file = exercise.write(tmp_path)
        right = (ROOT / exercise.script).read_text()
        assert ast.dump(ast.parse(file.read_text())) != ast.dump(ast.parse(right)), file
        assert all(exercise.hints(tmp_path)) and exercise.task
        assert f'cog fence("{exercise.script}"' in pages
    for exercise in PREDICTIONS:
        page, _, section = exercise.about.partition(", ")
        assert "# " + section.strip('"') in (ROOT / page).read_text()


@pytest.mark.parametrize("exercise", first(3, WITH_FILES), ids=lambda exercise: exercise.key)
def test_a_file_fails_at_the_check_that_it_is_about(tmp_path, exercise, capsys):
    """And only what that check builds on is judged before it."""
    file = exercise.write(tmp_path)
    assert judge(exercise.stage, file, toy_task, tmp_path, exercise.check) == [exercise.check]
    assert capsys.readouterr().out.count("  ok  ") <= 4


@pytest.mark.long
@pytest.mark.parametrize("exercise", first(1, PREDICTIONS), ids=lambda e: e.name)
def test_a_run_answers_as_is_expected(exercise):
    output, found = exercise.answer()
    assert found == str(EXPECTED[exercise.name]), output
    assert exercise.choices == "a number" or found in exercise.choices.split(", ")


def start(folder):
    """Types `make learn`'s command into a terminal of 80 columns."""
    command = ["-m", "tools.learn", "--folder", str(folder)]
    options = {"cwd": ROOT, "env": environment(), "encoding": "utf-8", "dimensions": (40, 80)}
    return pexpect.spawn(sys.executable, command, timeout=TIMEOUT_S, **options)


@pytest.mark.long
def test_the_loop(tmp_path):
    """A save is judged, h, n, b and q work, and what is passed stays so over a restart."""
    terminal = start(tmp_path)
    terminal.expect("Predict.*q: quit.*  > ")
    terminal.sendline("many")
    terminal.expect("'many' is no answer")
    terminal.sendline("h")
    terminal.expect("about docs/singlegpu.md")
    terminal.sendline("64")
    terminal.expect("python singlegpu.py.*43 steps per epoch.*✗ You said 64, and it is 43")
    terminal.expect("Repair.*✗ > .*q: quit")
    terminal.send("hh")
    terminal.expect("Look at _run_batch.*diff -U0")
    file = tmp_path / "singlegpu" / "repair_2.py"
    file.write_text(file.read_text() + "# still wrong\n")
    terminal.expect("keys work after it.*FAIL  It starts.*judged again when it is saved")
    terminal.send("n")
    terminal.expect("Repair.*✗ . >.*q: quit")
    terminal.send("b")
    terminal.expect("Repair.*✗ > ..*q: quit")
    terminal.send("n")
    terminal.expect("Repair.*✗ . >.*q: quit")
    terminal.send("q")
    terminal.expect(pexpect.EOF)

    shutil.copy(ROOT / "singlegpu.py", tmp_path / "singlegpu" / "repair_3.py")
    terminal = start(tmp_path)  # what was saved meanwhile is judged at once
    terminal.expect("1 of .* exercises passed.*Repair.*✗ . >.*q: quit")
    terminal.expect("ok  Two runs begin alike")
    terminal.send("q")
    terminal.expect(pexpect.EOF)
    said = run("python", "-m", "tools.learn", "--report", "--folder", tmp_path)
    assert said.stdout.startswith(f"{tmp_path}/report.txt says")
    version = run("git", "describe", "--always", "--dirty", "--tags").stdout.strip()
    lines = (tmp_path / "report.txt").read_text().splitlines()
    wrong = f"passed at version {version}, after a wrong prediction"
    assert f"singlegpu predict steps_of_one_process: {wrong}" in lines
    assert "no seed" not in str(lines)  # it was left before all checks
    assert "no seed" not in (tmp_path / "progress.json").read_text()


@pytest.mark.long
def test_a_right_file_passes(tmp_path):
    terminal = start(tmp_path)
    terminal.expect("Predict.*q: quit.*  > ")
    terminal.sendline("n")
    terminal.expect("Repair.*q: quit")
    shutil.copy(ROOT / "singlegpu.py", tmp_path / "singlegpu" / "repair_2.py")
    terminal.expect("all 14 checks passed.*Repair.*. ✓ >.*q: quit")
    terminal.send("q")
    terminal.expect(pexpect.EOF)


def test_without_a_terminal(tmp_path):
    said = run("python", "-m", "tools.learn", "--folder", tmp_path, stdin=subprocess.DEVNULL)
    file = tmp_path / "singlegpu" / "repair_2.py"
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.endswith(f"make check STAGE=singlegpu FILE={file}\n") and file.exists()
