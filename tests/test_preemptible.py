"""resumable.py, and preemptible.py, which stops at a signal: resumed, a run is the unbroken one."""

import os
import random
import re
import signal

import pytest
import torch
from helpers import (
    DROPOUT,
    FORK,
    LOG_LOSSES,
    SIGNAL,
    assert_equal,
    assert_trained,
    logged_losses,
    patch,
    pause,
    position,
    resize,
)

import singlegpu
from resumable import ResumableSampler
from tools.launch.snapshots import load, logged_positions

RESUMABLE = "resumable.py"
SCRIPT = "preemptible.py"
SIZE = 1000  # samples: 15 global batches of 64 and one of 40
STEPS = 16  # per epoch
BATCH_SIZE = 64  # of all ranks together

RESIZE = FORK + resize(SIZE)
# Notes which samples each process trains, by their first number.
RECORD = f"""{RESIZE}{pause(0.01)}  # so that a signal comes within the first epochs
@before(script.Trainer, "_run_batch")
def note_batch(self, inputs, targets):
    with open(f"trained-{{os.getpid()}}", "a") as file:
        file.writelines(f"{{value:.9g}}\\n" for value in inputs[:, 0].tolist())
"""


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [2, 64, 1000, 1001])
def test_rest_of_an_epoch(size, world_size):
    """From any sample on, the ranks together take each that is left once, in the epoch's order."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(5 + 3)).tolist()
    for samples_run in {0, 1, size // 3, size - 1, size, size + 1}:
        ranks = []
        for rank in range(world_size):
            sampler = ResumableSampler([0] * size, world_size, rank, seed=5)
            sampler.set_position(3, samples_run)
            ranks.append(list(sampler))
        together = [sample for step in zip(*ranks, strict=True) for sample in step]
        left = max(size - samples_run, 0)
        padding = -left % world_size
        assert together == order[samples_run:] + (order * world_size)[:padding]


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_before_any_step(shell, workers, kills=5):
    """With dropout, bit for bit the run that was left alone, and its loss at each snapshot."""
    script = patch(shell.folder, RESUMABLE, RESIZE + SIGNAL + DROPOUT + LOG_LOSSES)
    options = f"3 2 --num_workers {workers} --snapshot_path {shell.folder}"
    command = f"{script} {options}/uninterrupted --save_every_steps 1"
    undisturbed_losses = logged_losses(shell.ranks(command, 2).succeeds())
    chosen = sorted(random.sample(range(5, 3 * STEPS), kills))
    print("kills before steps", chosen)
    command = f"{script} {options}/killed --save_every_steps 5"
    nodes = [shell.folder / "a", shell.folder / "b"]  # each rank saves before it dies, too
    losses = {}
    saved = 0  # the last step that is in a snapshot
    for step in chosen:
        killed_at = f"{step // STEPS} {step % STEPS * BATCH_SIZE}"
        job = shell.ranks_on(nodes, command, SIGNAL="9", SIGNAL_AT=killed_at)
        assert job.wait() == -signal.SIGKILL
        losses |= logged_losses(job.output)
        by_steps = saved + (step - saved) // 5 * 5
        by_epochs = 2 * STEPS if step >= 2 * STEPS else 0
        saved = max(by_steps, by_epochs)
        end = (saved // STEPS, saved % STEPS * BATCH_SIZE)
        assert position(shell.folder / "killed") == end, (chosen, job.output)
    output = shell.ranks(command, 2).succeeds()
    losses |= logged_losses(output)
    assert f"{saved // STEPS} of 3 epochs done" in output
    assert_equal(shell.folder / "uninterrupted", shell.folder / "killed")
    assert losses == pytest.approx({at: undisturbed_losses[at] for at in losses}, rel=1e-6)


def trained(folder):
    """Returns the numbers of the samples that processes have trained so far."""
    numbers = {
        f"{value:.9g}": index
        for index, value in enumerate(singlegpu.ToyDataset(SIZE).inputs[:, 0].tolist())
    }
    assert len(numbers) == SIZE
    lines = [line for path in folder.glob("trained-*") for line in path.read_text().splitlines()]
    return [numbers[line] for line in lines]


def test_sighup_with_data_workers(shell):
    """torchrun signals whole process groups. The rest of the epoch is for one rank.

    No sample is trained twice.
    """
    script = patch(shell.folder, SCRIPT, RECORD)
    job = shell.start(
        f"torchrun --standalone --nproc_per_node=2 {script} 1000 1000 --save_every_steps 6"
        " --num_workers 2"
    )
    job.wait_for("saved", times=2)
    os.kill(job.torchrun(), signal.SIGHUP)  # as a terminal does that closes
    assert job.wait() != 0
    assert job.output.count("stopped by a signal") == 2
    assert "DataLoader worker" not in job.output and "Error" not in job.output, job.output
    epochs, samples = position(shell.folder / "snapshot.pt")
    assert logged_positions(job.output)[-1] == (epochs, samples)
    assert len(trained(shell.folder)) == epochs * SIZE + min(samples, SIZE)

    job = shell.ranks(f"{script} {epochs + 1} --batch_size 64 --num_workers 1")
    output = job.succeeds()
    assert f"{epochs} of {epochs + 1} epochs done" in output
    assert sorted(trained(shell.folder)) == sorted(list(range(SIZE)) * (epochs + 1))
    losses = assert_trained(shell.folder / "snapshot.pt", epochs + 1, BATCH_SIZE, size=SIZE)
    assert load(shell.folder / "snapshot.pt")["loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_sigterm_and_back(shell):
    """With dropout, bit for bit the run that was left alone."""
    script = patch(shell.folder, SCRIPT, RESIZE + pause(0.005) + DROPOUT)
    job = shell.ranks(f"{script} 1000 1000 --save_every_steps 3", 2)
    job.wait_for("saved", times=random.randrange(1, 6))
    job.signal(signal.SIGTERM)
    job.fails("stopped by a signal")
    epochs, _ = position(shell.folder / "snapshot.pt")
    command = f"{script} {epochs + 1} 1000"
    shell.ranks(command, 2).succeeds()
    shell.ranks(f"{command} --snapshot_path uninterrupted", 2).succeeds()
    assert_equal(shell.folder / "uninterrupted", shell.folder / "snapshot.pt")


SLOW_SAVE = """
@before(script.Trainer, "_save_snapshot")
def save_slowly(self):
    time.sleep(0.5 * self.is_main)
"""
SAY_GROUP = """
import atexit
atexit.register(lambda: print("group left:", not script.dist.is_initialized()))
"""


@pytest.mark.parametrize(
    ("name", "signum"), [(SCRIPT, signal.SIGTERM), ("elastic_ddp.py", signal.SIGINT)]
)
def test_signal_to_one_of_three(shell, name, signum):
    """All stop after the same step, and end only when rank 0 has saved it, however long it takes.

    Otherwise, srun --kill-on-bad-exit would end rank 0 while it saves.
    """
    script = patch(shell.folder, name, SLOW_SAVE + SAY_GROUP)
    snapshot = shell.folder / "snapshot.pt"
    folders = [shell.folder / node for node in "abc"]
    job = shell.ranks_on(folders, f"{script} 100 1 --snapshot_path {snapshot}")
    job.wait_for("saved")
    os.kill(job.ranks[1].pid, signum)
    assert job.wait() == 1
    assert job.output.count("stopped by a signal") == 3
    assert job.output.count("group left: True") == 3  # or NCCL warns
    assert "Error" not in job.output, job.output
    before, _, after = job.output.partition("stopped by a signal")
    assert "saved" not in after
    epochs, samples = position(snapshot)
    assert f"epoch {epochs} + {samples} samples |" in before
    shell.ranks_on(folders, f"{name} {epochs + 1} 1 --snapshot_path {snapshot}").succeeds()


def test_epochs_of_one_step(shell):
    """Steps are counted over the epochs: it saves every seventh, once, and stops at a signal."""
    job = shell.ranks(f"{SCRIPT} 100000 100000 --batch_size 1024 --save_every_steps 7", 2)
    job.wait_for("saved", times=3)
    job.signal(signal.SIGINT)
    job.fails("stopped by a signal")
    saved = re.findall(r"epoch (\d+ \+ \d+) samples", job.output)
    assert saved[:3] == ["7 + 0", "14 + 0", "21 + 0"]
    assert saved[-1].endswith(" + 2048")


def test_ranks_at_different_samples(shell):
    """Without a shared disk, only the node of rank 0 has the newest snapshot."""
    folders = [shell.folder / "a", shell.folder / "b"]
    script = patch(shell.folder, RESUMABLE, RESIZE + SIGNAL)
    command = f"{script} 3 --batch_size 64 --save_every_steps 4"
    for folder, step in zip(folders, (9, 14), strict=True):
        killed_at = f"0 {step * BATCH_SIZE}"
        shell.ranks_on([folder], command, SIGNAL="9", SIGNAL_AT=killed_at).wait()
    shell.ranks_on(folders, f"{script} 3").fails(
        "ranks start at [(0, 512, 'seed 0, 1000 samples'), (0, 768, 'seed 0, 1000 samples')]: "
        "share or copy the snapshot and data, use one seed"
    )


# Eight lives of one training: a stage, its ranks, its last epoch, and after which sample of which
# epoch it gets a signal, with what it has then saved.
LIVES = [
    ("multinode.py", 2, 1, None, (1, 0)),
    ("resumable.py", 3, 4, (9, "1 576"), (1, 480)),
    ("preemptible.py", 1, 4, (15, "1 624"), (1, 960)),
    ("elastic_ddp.py", 2, 4, (15, "2 96"), (2, 480)),
    ("preemptible.py", 3, 4, (15, "2 576"), (2, 960)),
    ("resumable.py", 2, 4, (9, "3 288"), (3, 240)),
    ("elastic_ddp.py", 1, 4, None, (4, 0)),
    ("multinode.py", 3, 5, None, None),
]


def test_resumed_by_each_stage(shell):
    """Forth and back, on 1 to 3 ranks: the plain loop's weights, in float64 to 1e-12."""
    size, batch_size = 960, 48  # 20 steps per epoch
    setup = f"torch.set_default_dtype(torch.float64)\n{FORK}{resize(size)}"
    for name, ranks, epochs, stop, saved in LIVES:
        options = f"{epochs} --batch_size {batch_size // ranks}"
        if name == "elastic_ddp.py":
            options = f"{epochs} --global_batch_size {batch_size}"
        signum, at = stop or (0, "")
        if stop:
            options += " --save_every_steps 5"
        script = patch(shell.folder, name, setup + (SIGNAL if stop else ""))
        job = shell.ranks(f"{script} {options}", ranks, SIGNAL=str(signum), SIGNAL_AT=at)
        # Where one rank is killed, the other may get SIGTERM.
        assert job.wait() in {0: [0], 9: [-9, -15], 15: [1]}[signum], job.output
        if saved:
            snapshot = load(shell.folder / "snapshot.pt")
            assert (snapshot["epochs_run"], snapshot.get("samples_run", 0)) == saved, job.output
    torch.set_default_dtype(torch.float64)
    try:
        assert_trained(shell.folder / "snapshot.pt", 5, batch_size, 1e-12, size=size)
    finally:
        torch.set_default_dtype(torch.float32)
