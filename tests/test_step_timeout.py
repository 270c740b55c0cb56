"""A step that hangs ends the job, the log names the cause, and the job resumes without it."""

import os
import random
import re
import signal

import pytest
from helpers import (
    ROOT,
    assert_equal,
    needs_slurm,
    patched,
    position,
)

SCRIPT = "recipes/step_timeout.py"
# Rank 0 waits for data forever as soon as there is a file `no_data`; and nobody waits for long.
# With BUSY, the thread looks into the store all the time, also while the process ends.
NO_DATA = """
sleep = time.sleep
busy = "BUSY" in os.environ
time.sleep = lambda seconds: sleep(0 if busy and seconds == 1 else seconds / 10)
getitem = script.ToyDataset.__getitem__
def wait_for_data(self, index):
    while os.environ["RANK"] == "0" and os.path.exists("no_data"):
        sleep(0.1)
    return getitem(self, index)
script.ToyDataset.__getitem__ = wait_for_data
"""


def assert_trained(shell, epochs):
    """Asserts that a snapshot is, bit for bit, that of a run that nothing has interrupted."""
    shell.ranks(f"preemptible.py {epochs} 1000 --snapshot_path uninterrupted", 2).succeeds()
    assert_equal(shell.folder / "uninterrupted", shell.folder / "snapshot.pt")


@pytest.mark.parametrize(
    "cause", ["frozen", pytest.param("waits for data", marks=pytest.mark.long)]
)
def test_late_rank_is_named(shell, cause):
    """All that are not frozen print their stacks and end. Rank 0 is late: the store is torchrun's.

    With gloo, a rank may end by the error that the other has gone, which has its stack as well.
    Resumed, the training ends with the weights of an uninterrupted run.
    """
    script = shell.folder / "patched.py"
    script.write_text(patched(SCRIPT, NO_DATA))
    command = f"torchrun --standalone --nproc_per_node=2 {script}"
    job = shell.start(f"{command} 1000 1000 --save_every_steps 10 --step_timeout 2")
    job.wait_for("saved", times=3)
    if cause == "frozen":
        frozen = job.workers()[0]
        os.kill(frozen, signal.SIGSTOP)
        job.wait_for("Sending process")
        os.kill(frozen, signal.SIGKILL)  # as torchrun does 30 seconds later
    else:
        (shell.folder / "no_data").touch()
    assert job.wait() == 1
    (node,) = set(re.findall(r"rank 0 of 2 starts on (\S+)", job.output))
    named = set(re.findall(r"step timeout \| late: (.*) \| rank \d waits at:", job.output))
    assert named == {f"rank 0 on {node}"}, job.output
    assert "in _run_epoch\n" in job.output
    assert ("in wait_for_data\n" in job.output) == (cause != "frozen")

    (shell.folder / "no_data").unlink(missing_ok=True)
    epochs = position(shell.folder / "snapshot.pt")[0] + 1
    output = shell.run(f"{command} {epochs} --step_timeout 20", BUSY="1")
    assert f"{epochs - 1} of {epochs} epochs done" in output
    assert_trained(shell, epochs)


@pytest.fixture
def with_recipe(cluster, shell):
    (shell.folder / "recipes").symlink_to(ROOT / "recipes")
    return cluster


SUBMIT = "sbatch --parsable --nodes=2 --gpus-per-node=1 slurm/step_timeout.sbatch"
# freeze VARIABLE START: once the job has saved in this start, freezes each rank with the variable,
# and waits for the next start. Slurm waits two minutes for it; a pocket cluster, three seconds, and
# then Slurm may end the new start a minute later, with the signal that was meant for the old one.
FREEZE = """
freeze() {
  log=step_timeout-$job.out
  until [ "$(grep -c 'epochs done' $log)" = $2 ] &&
    tac $log | sed '/epochs done/q' | grep -q saved; do sleep 0.2; done 2>/dev/null
  for rank in $(pgrep -f 'python -u recipes/step_timeout.py'); do
    if tr '\\0' '\\n' </proc/$rank/environ | grep -qx $1; then kill -STOP $rank; fi
  done
  until [ "$(grep -c '^late nodes' $log)" = $2 ]; do sleep 0.2; done
  until scontrol update JobId=$job StartTime=now+75; do sleep 0.2; done 2>/dev/null
  until [ "$(grep -c 'epochs done' $log)" -gt $2 ]; do sleep 0.2; done
  echo start $2 was frozen
}
"""


def starts(output):
    """Returns the nodes of each start of the job."""
    found = re.findall(r"rank (\d) of 2 starts on (\w+)", output)
    return [{node for _, node in found[first : first + 2]} for first in range(0, len(found), 2)]


@pytest.mark.long
@needs_slurm
@pytest.mark.parametrize("round", range(5))
def test_frozen_rank_in_a_job(with_recipe, shell, round):
    rank = random.randrange(2)
    job = with_recipe(
        f"""
        {FREEZE}
        job=$({SUBMIT} 200 1000 --step_timeout 3 --save_every_steps 20)
        freeze RANK={rank} 1
        """
    )
    job.wait_for("start 1 was frozen")
    assert job.wait() == 0, job.output
    output = next(shell.folder.glob("step_timeout-*.out")).read_text()
    node = re.search(rf"rank {rank} of 2 starts on (\w+)", output)[1]
    assert f"| late: rank {rank} on {node} | rank {1 - rank} waits at:" in output
    assert re.findall("^late nodes: (.*)", output, re.MULTILINE) == [node]
    assert len(starts(output)) == 2
    assert_trained(shell, 200)


@pytest.mark.long
@needs_slurm
def test_node_late_twice_is_excluded(with_recipe, shell):
    job = with_recipe(
        f"""
        {FREEZE}
        job=$({SUBMIT} 200 1000 --step_timeout 3 --save_every_steps 20)
        freeze SLURMD_NODENAME=node2 1
        freeze SLURMD_NODENAME=node2 2
        """,
        "-n 3",
    )
    job.wait_for("start 1 was frozen")
    job.wait_for("start 2 was frozen")
    assert job.wait() == 0, job.output
    output = next(shell.folder.glob("step_timeout-*.out")).read_text()
    assert re.findall("^late nodes: (.*)", output, re.MULTILINE) == ["node2"] * 2
    assert starts(output) == [{"node1", "node2"}, {"node1", "node2"}, {"node1", "node3"}]
    assert_trained(shell, 200)


@pytest.mark.long
@needs_slurm
def test_exception_is_not_requeued(with_recipe, shell):
    """As an ordinary failure, it ends the job for good."""
    setup = """
save_snapshot = script.Trainer._save_snapshot
def save_and_fail(self):
    save_snapshot(self)
    raise RuntimeError("no such luck")
script.Trainer._save_snapshot = save_and_fail
"""
    (shell.folder / "fails.py").write_text(patched(SCRIPT, setup))
    job = with_recipe(f"{SUBMIT} fails.py 4 2")
    assert job.wait() == 1
    assert "step_timeout FAILED" in job.output
    output = next(shell.folder.glob("step_timeout-*.out")).read_text()
    assert "RuntimeError: no such luck" in output and "late nodes" not in output
    assert len(starts(output)) == 1


@pytest.mark.long
@needs_slurm
def test_ten_timeouts_are_enough(cluster, shell):
    """What stands for torchrun fails as it does after a step timeout to which all were in time."""
    job_file = (ROOT / "slurm" / "step_timeout.sbatch").read_text()
    fail = "bash -c 'echo \"step timeout | late:  | rank 0 waits at:\"; sleep 1; exit 1' torchrun"
    assert job_file.count("=1 torchrun") == 1
    (shell.folder / "job.sbatch").write_text(job_file.replace("=1 torchrun", f"=1 {fail}"))
    job = cluster("sbatch --nodes=2 --gpus-per-node=1 --output=%x.out job.sbatch")
    assert job.wait() == 1
    output = (shell.folder / "step_timeout.out").read_text()
    assert output.count("late nodes: \n") == 11
    assert output.rstrip().endswith("11 step timeouts: giving up")
