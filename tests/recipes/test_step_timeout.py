"""A step that hangs ends the job, the log names the cause, and the job resumes without it."""

import re

import pytest
from helpers import assert_equal, needs_slurm, patch, position, read_script, snippet, start

from tools.compose.compose import compose
from tools.steps import ROOT

SCRIPT = "recipes/step_timeout.py"


def assert_trained(shell, epochs):
    """Asserts that a snapshot is, bit for bit, that of a run that nothing has interrupted."""
    shell.ranks(f"preemptible.py {epochs} 1000 --snapshot_path uninterrupted", 2).succeeds()
    assert_equal(shell.folder / "uninterrupted", shell.folder / "snapshot.pt")


@pytest.mark.long
def test_late_rank_is_named(shell):
    """All print their stacks and end. Rank 0 is late, as it waits for data.

    With gloo, a rank may end by the error that the other has gone, which has its stack as well.
    Resumed, the training ends with the weights of an uninterrupted run.
    """
    script = patch(shell.folder, SCRIPT, read_script("no_data.py"))
    command = f"torchrun --standalone --nproc_per_node=2 {script}"
    job = shell.start(f"{command} 1000 1000 --save_every_steps 10 --step_timeout 2")
    job.wait_for("saved", times=3)
    (shell.folder / "no_data").touch()
    assert job.wait() == 1
    (node,) = set(re.findall(r"rank 0 of 2 on (\S+) starts", job.output))
    named = set(re.findall(r"step timeout \| late: (.*) \| rank \d waits at:", job.output))
    assert named == {f"rank 0 on {node}"}, job.output
    assert "Timeout (0:00:00.001" in job.output  # at once, not by the timer for a dead store
    assert "epoch 0 + 640 samples" in job.output and "epoch 0 + 320 samples" not in job.output
    assert "in _run_epoch\n" in job.output
    assert "in wait_for_data\n" in job.output

    (shell.folder / "no_data").unlink()
    epochs = position(shell.folder / "snapshot.pt")[0] + 1
    output = shell.run(f"{command} {epochs} --step_timeout 20", BUSY="1")
    assert f"{epochs - 1} of {epochs} epochs done" in output
    assert "Traceback" not in output  # of the thread, which ends with the training
    assert_trained(shell, epochs)


@pytest.mark.long
def test_none_is_late(shell):
    """Where all wait in the same step, as in collectives that do not match, none is named."""
    (shell.folder / "no_data").touch()
    script = patch(shell.folder, SCRIPT, read_script("no_data.py"))
    command = f"torchrun --standalone --nproc_per_node=2 {script} 1 --step_timeout 1"
    job = shell.start(command, LATE="0 1")
    assert job.wait() == 1
    assert set(re.findall(r"step timeout \| late: (.*) \| rank", job.output)) == {""}, job.output


def test_store_that_does_not_answer(shell):
    """The rank ends all the same, by a timer of its own."""
    job = start(shell, SCRIPT, "100 --step_timeout 2", read_script("dead_store.py"), 1)
    assert job.wait() == 1
    assert "Timeout (0:00:01" in job.output and "in check\n" in job.output


@pytest.mark.long
def test_long_evaluation(shell):
    """In a composed script, an evaluation may take longer than a step."""
    script = shell.folder / "composed.py"
    lines = compose([SCRIPT, "recipes/evaluate.py"], script.name)
    script.write_text("\n".join(line for line, _ in lines))
    setup = """
@before(script.nn.MSELoss, "forward")
def slow_down(self, outputs, targets):
    time.sleep(0 if torch.is_grad_enabled() else 0.5)
"""
    path = patch(shell.folder, script, setup, "slow.py")
    assert shell.ranks(f"{path} 1 --step_timeout 2", 2).succeeds().count("val loss") == 2


@pytest.fixture
def with_lines(cluster, shell):
    """A pocket cluster with a job.sbatch: the page's lines below those of preemptible.sbatch."""
    (shell.folder / "recipes").symlink_to(ROOT / "recipes")
    job_file = (ROOT / "slurm" / "preemptible.sbatch").read_text()
    lines = snippet("recipes/step_timeout.md", "step timeout")
    (shell.folder / "job.sbatch").write_text(job_file + lines)
    return cluster


SUBMIT = "sbatch --parsable --nodes=2 --gpus-per-node=1 --output=job.out job.sbatch"


@pytest.mark.nightly
@needs_slurm
def test_frozen_rank_in_a_job(with_lines, shell):
    """The job is requeued, and resumes on another node in place of the one that was late.

    A pocket cluster starts it after three seconds, but then Slurm may end the new start a minute
    later, with the signal that was meant for the old one.
    """
    job = with_lines(
        f"""
        export PET_SHUTDOWN_TIMEOUT=5
        job=$({SUBMIT} {SCRIPT} 200 1000 --step_timeout 3 --save_every_steps 20)
        until grep -q saved job.out; do sleep 0.2; done 2>/dev/null
        for rank in $(pgrep -f 'python -u {SCRIPT}'); do
          if grep -qz SLURMD_NODENAME=node2 /proc/$rank/environ; then kill -STOP $rank; fi
        done
        until squeue | grep ' PD '; do sleep 0.2; done
        scontrol update JobId=$job ExcNodeList=node2 StartTime=now+75
        """,
        "-n 3",
    )
    job.wait_for(" PD ")
    assert job.wait() == 0, job.output
    output = (shell.folder / "job.out").read_text()
    assert "| late: rank 1 on node2 | rank 0 waits at:" in output
    nodes = re.findall(r"rank \d of 2 on (\w+) starts", output)
    assert [set(nodes[:2]), set(nodes[2:])] == [{"node1", "node2"}, {"node1", "node3"}]
    assert_trained(shell, 200)


@pytest.mark.nightly
@needs_slurm
def test_exception_is_not_requeued(with_lines, shell):
    """As an ordinary failure, it ends the job for good."""
    setup = """
@after(script.Trainer, "_save_snapshot")
def fail(self):
    raise RuntimeError("no such luck")
"""
    patch(shell.folder, SCRIPT, setup, "fails.py")
    job = with_lines(f"{SUBMIT} fails.py 4 2")
    assert job.wait() == 1
    assert "preemptible FAILED" in job.output
    output = (shell.folder / "job.out").read_text()
    assert "RuntimeError: no such luck" in output
    assert output.count("epochs done") == 1
