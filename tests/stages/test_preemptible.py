"""Stages that save within an epoch, stop at a signal, or lose nodes: resumed, a run is unbroken."""

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
    LONG,
    SIGNAL,
    assert_trained,
    documented_error,
    first,
    logged_losses,
    patch,
    pause,
    position,
    resize,
    start,
    weights_and_momentum,
)
from rankcheck.launch.jobs import free_port

import singlegpu
from resumable import ResumableSampler
from tools.launch.snapshots import load, logged_positions, max_abs_diff

SCRIPT = "preemptible.py"
ELASTIC = "elastic_ddp.py"
SAVE_AFTER_FAILURE = "recipes/save_after_failure.py"
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
            sampler.set_epoch(3)
            sampler.samples_run = samples_run
            ranks.append(list(sampler))
        together = [sample for step in zip(*ranks, strict=True) for sample in step]
        left = max(size - samples_run, 0)
        padding = -left % world_size
        assert together == order[samples_run:] + (order * world_size)[:padding]


def trained(folder):
    """Returns the numbers of the samples that processes have trained so far."""
    numbers = {
        f"{value:.9g}": index
        for index, value in enumerate(singlegpu.ToyDataset(SIZE).inputs[:, 0].tolist())
    }
    assert len(numbers) == SIZE
    lines = [line for path in folder.glob("trained-*") for line in path.read_text().splitlines()]
    return [numbers[line] for line in lines]


# By default, Python 3.14 starts processes by a server, which a signal to the process group ends.
FORK_SERVER = """
import multiprocessing
multiprocessing.set_start_method("forkserver", force=True)

setsid = os.setsid
def show_parent():  # a data worker starts a session of its own
    print("started by", os.getppid(), "for", multiprocessing.parent_process().pid)
    setsid()
os.setsid = show_parent
"""


@pytest.mark.long
def test_sigterm_with_data_workers(shell):
    """torchrun signals whole process groups. The rest of the epoch is for one rank.

    No sample is trained twice.
    """
    script = patch(shell.folder, SCRIPT, RECORD + FORK_SERVER)
    job = shell.start(
        f"torchrun --standalone --nproc_per_node=2 {script} 1000 1000 --save_every_steps 6"
        " --num_workers 2"
    )
    job.wait_for("saved", times=2)
    os.kill(job.torchrun(), signal.SIGTERM)
    assert job.wait() != 0
    assert job.output.count("stopped by a signal") == 2
    assert "DataLoader worker" not in job.output and "Error" not in job.output, job.output
    workers = re.findall(r"started by (\d+) for (\d+)", job.output)
    assert workers and all(parent == rank for parent, rank in workers)
    epochs, samples = position(shell.folder / "snapshot.pt")
    assert logged_positions(job.output)[-1] == (epochs, samples)
    assert len(trained(shell.folder)) == epochs * SIZE + min(samples, SIZE)

    job = shell.ranks(f"{script} {epochs + 1} --batch_size 64 --num_workers 1")
    output = job.succeeds()
    assert f"{epochs} of {epochs + 1} epochs done" in output
    assert sorted(trained(shell.folder)) == sorted(list(range(SIZE)) * (epochs + 1))
    losses = assert_trained(shell.folder / "snapshot.pt", epochs + 1, BATCH_SIZE, size=SIZE)
    assert load(shell.folder / "snapshot.pt")["loss"] == pytest.approx(losses[-1], rel=1e-6)


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
    ("name", "signum"), first(1, [(SCRIPT, signal.SIGTERM), (ELASTIC, signal.SIGINT)], LONG)
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
    """Steps are counted over the epochs: it saves every seventh, and stops at a signal."""
    job = shell.ranks(f"{SCRIPT} 100000 100000 --batch_size 1024 --save_every_steps 7", 2)
    job.wait_for("saved", times=3)
    job.signal(signal.SIGINT)
    job.fails("stopped by a signal")
    saved = re.findall(r"epoch (\d+ \+ \d+) samples", job.output)
    assert saved[-1].endswith(" + 2048")
    assert saved[:3] == ["6 + 2048", "13 + 2048", "20 + 2048"]


# Ten lives of one training: a stage, its ranks, its last epoch, and after which sample of which
# epoch it gets a signal, with what it has then saved.
LIVES = [
    ("singlegpu.py", 1, 1, None, None),
    ("multigpu.py", 2, 2, None, None),
    ("multigpu_torchrun.py", 3, 3, None, None),
    ("resumable.py", 3, 6, (9, "3 576"), (3, 480)),
    ("preemptible.py", 1, 6, (15, "3 624"), (3, 960)),
    ("elastic_ddp.py", 2, 6, (15, "4 96"), (4, 480)),
    ("preemptible.py", 3, 6, (15, "4 576"), (4, 960)),
    ("resumable.py", 2, 6, (9, "5 288"), (5, 240)),
    ("elastic_ddp.py", 1, 6, None, (6, 0)),
    ("multinode.py", 3, 7, None, None),
]


def test_resumed_by_each_stage(shell):
    """On 1 to 3 ranks, also by an earlier stage: the plain loop's weights, in float64 to 1e-12."""
    size, batch_size = 960, 48  # 20 steps per epoch
    setup = f"torch.set_default_dtype(torch.float64)\n{FORK}{resize(size)}"
    for name, ranks, epochs, stop, saved in LIVES:
        options = f"{epochs} --batch_size {batch_size // ranks}"
        if name == "elastic_ddp.py":
            options = f"{epochs} --global_batch_size {batch_size}"
        signum, at = stop or (0, "")
        if stop:
            options += f" --save_every_steps 5 --num_workers {int(signum == 15)}"  # also signaled
        script = patch(shell.folder, name, setup + (SIGNAL if stop else ""))
        job = shell.ranks(f"{script} {options}", ranks, SIGNAL=str(signum), SIGNAL_AT=at)
        # Where one rank is killed, the other may get SIGTERM.
        assert job.wait() in {0: [0], 9: [-9, -15], 15: [1]}[signum], job.output
        if saved:
            assert position(shell.folder / "snapshot.pt") == saved, job.output
    torch.set_default_dtype(torch.float64)
    assert_trained(shell.folder / "snapshot.pt", 7, batch_size, 1e-12, size=size)


# elastic_ddp.py: every sample counts once. Nodes come and go in tests/faults/chaos.py.

ELASTIC_STEPS = 32  # per epoch: global batches of 64 of 2048 samples


@pytest.mark.parametrize(
    ("ranks", "size", "batch_size"), first(1, [(3, 2047, 50), (2, 20, 1)], LONG)
)
def test_uneven_shards(shell, ranks, size, batch_size):
    """50 samples are no multiple of 3, and the last batch has but 47; of 1, rank 1 has none."""
    options = f"4 1 --global_batch_size {batch_size}"
    output = start(shell, ELASTIC, options, resize(size), ranks).succeeds()
    starts = re.findall(r"rank (\d) of (\d) on \S+ starts", output)
    assert sorted(starts) == [(str(rank), str(ranks)) for rank in range(ranks)]
    losses = assert_trained(shell.folder / "snapshot.pt", 4, batch_size, size=size)
    logged = [float(loss) for loss in re.findall(r"epoch [1-4] \+ 0 samples \| loss (\S+)", output)]
    assert logged == pytest.approx(losses, rel=1e-3)  # as many digits as there are
    assert load(shell.folder / "snapshot.pt")["loss"] == pytest.approx(losses[-1], rel=1e-6)


def sharing(shell, num_nodes, script, arguments, **variables):
    """Starts a rank on each of some nodes that share a disk; returns them and their snapshot."""
    folders = [shell.folder / name for name in "abc"[:num_nodes]]
    snapshot = shell.folder / "snapshot.pt"
    command = f"{script} {arguments} --snapshot_path {snapshot}"
    return shell.ranks_on(folders, command, **variables), snapshot


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", first(1, [2, 3]))
def test_survivors_save_five_times(shell, num_nodes, kills=5):
    """With dropout, the run that was left alone. The loss of an epoch with a kill is an estimate.

    Bit for bit on two ranks. DDP adds the gradients of more in another order in its first step.
    """
    script = patch(shell.folder, SAVE_AFTER_FAILURE, SIGNAL + DROPOUT + LOG_LOSSES)
    job, undisturbed = sharing(shell, num_nodes, script, "3 1 --save_every_steps 1")
    undisturbed_losses = logged_losses(job.succeeds())
    undisturbed = undisturbed.rename(shell.folder / "undisturbed.pt")
    losses, chosen = {}, sorted(random.sample(range(1, 3 * ELASTIC_STEPS), kills))
    for step in chosen:
        rank = random.randrange(num_nodes)
        print("kills rank", rank, "before step", step)
        killed_at = (step // ELASTIC_STEPS, step % ELASTIC_STEPS * 64)
        die = {"SIGNAL": "9", "SIGNAL_AT": "{} {}".format(*killed_at), "SIGNAL_RANK": str(rank)}
        job, snapshot = sharing(shell, num_nodes, script, "3 3 --save_every_steps 7", **die)
        assert job.wait() == -signal.SIGKILL
        losses |= logged_losses(job.output)
        assert position(snapshot) == killed_at, job.output
        assert len(list(shell.folder.glob("*.tmp"))) <= num_nodes
    job, snapshot = sharing(shell, num_nodes, script, "3 3 --save_every_steps 7")
    losses |= logged_losses(job.succeeds())
    weights = [weights_and_momentum(path)[0] for path in (undisturbed, snapshot)]
    assert max_abs_diff(*weights) < 1e-6
    assert num_nodes > 2 or all(map(torch.equal, *weights))
    for (epochs, samples), loss in losses.items():
        is_estimate = epochs - (samples == 0) in [step // ELASTIC_STEPS for step in chosen]
        expected = undisturbed_losses[epochs, samples]
        assert loss == pytest.approx(expected, rel=0.5 if is_estimate else 1e-6)


def test_killed_while_saving(shell):
    """Rank 0 dies as it saves, and the other as it saves in its place: a file is left of each."""
    setup = "script.os.replace = lambda source, target: os.kill(os.getpid(), 9)"
    for _ in range(2):
        job, snapshot = sharing(shell, 2, patch(shell.folder, SAVE_AFTER_FAILURE, setup), "3 1")
        assert job.wait() == -signal.SIGKILL
        left = sorted(path.name for path in shell.folder.glob("*.tmp"))
        assert left == [f"snapshot.pt.{node}.tmp" for node in range(2)]
    job, snapshot = sharing(shell, 2, ELASTIC, "3 1")
    job.succeeds()
    assert_trained(snapshot, 3, 64)


def test_no_older_snapshot_replaces_a_newer_one(shell):
    """A world that was cut off ends at last: others have trained on and saved meanwhile."""
    job, snapshot = sharing(shell, 3, SAVE_AFTER_FAILURE, "100000 1 --timeout 30")
    job.wait_for("epoch 1 + 0 samples")
    for rank in job.ranks:  # none of them saves while the file is replaced
        os.kill(rank.pid, signal.SIGSTOP)
    torch.save(load(snapshot) | {"epochs_run": 90000}, snapshot)
    os.kill(job.ranks[0].pid, signal.SIGKILL)
    for rank in job.ranks[1:]:
        os.kill(rank.pid, signal.SIGCONT)
    assert job.wait() != 0
    assert load(snapshot)["epochs_run"] == 90000


@pytest.mark.long
def test_late_peer(shell):
    """Each ends with an error of torch if the other is missing."""
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    errors = {
        "0": documented_error("DistStoreError: Timed out after"),
        "1": documented_error("DistNetworkError: The client socket has timed out after"),
    }
    for rank, error in errors.items():
        port = str(free_port())
        command = f"python {ELASTIC} 3 --timeout 2"
        job = shell.start(command, RANK=rank, MASTER_PORT=port, **world)
        assert job.wait() == 1
        assert job.output.splitlines()[-1].startswith(f"torch.distributed.{error}"), job.output
