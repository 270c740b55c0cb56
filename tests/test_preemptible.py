"""Stages that save within an epoch, stop at a signal, or lose nodes: resumed, a run is unbroken."""

import os
import random
import re
import signal
import time
from itertools import zip_longest

import pytest
import torch
import torch.distributed as dist
from helpers import (
    DROPOUT,
    FORK,
    LOG_LOSSES,
    SIGNAL,
    assert_equal,
    assert_trained,
    documented_error,
    logged_losses,
    patch,
    pause,
    position,
    resize,
    weights_and_momentum,
)

import elastic_ddp
import singlegpu
from resumable import ResumableSampler
from tools.launch.jobs import TIMEOUT_S, free_port
from tools.launch.snapshots import load, logged_positions, max_abs_diff

RESUMABLE = "resumable.py"
SCRIPT = "preemptible.py"
ELASTIC = "elastic_ddp.py"
OWN_DISKS = "recipes/own_disks.py"
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
            sampler.set_position(3, samples_run)
            ranks.append(list(sampler))
        together = [sample for step in zip(*ranks, strict=True) for sample in step]
        left = max(size - samples_run, 0)
        padding = -left % world_size
        assert together == order[samples_run:] + (order * world_size)[:padding]


@pytest.mark.long
def test_killed_with_data_workers(shell, kills=5):
    """With dropout, bit for bit the run that was left alone, and its loss at each snapshot."""
    script = patch(shell.folder, RESUMABLE, RESIZE + SIGNAL + DROPOUT + LOG_LOSSES)
    options = f"3 2 --num_workers 2 --snapshot_path {shell.folder}"
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


# By default, Python 3.14 starts processes by a server, which a signal to the process group ends.
FORK_SERVER = """
import multiprocessing
multiprocessing.set_start_method("forkserver", force=True)

@before(script, "start_own_session")
def show_parent(worker_id):
    print("started by", os.getppid(), "for", multiprocessing.parent_process().pid)
"""


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


@pytest.mark.parametrize(("name", "signum"), [(SCRIPT, signal.SIGTERM), (ELASTIC, signal.SIGINT)])
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
    assert saved[:3] == ["6 + 2048", "13 + 2048", "20 + 2048"]
    assert saved[-1].endswith(" + 2048")


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


# elastic_ddp.py: nodes come and go, and every sample counts once.

ELASTIC_STEPS = 32  # per epoch: global batches of 64 of 2048 samples


@pytest.mark.parametrize("size", [2048, 2047])
@pytest.mark.parametrize("batch_size", [64, 50])
def test_samples_of_an_epoch(size, batch_size, monkeypatch):
    """From any sample on, any number of ranks split what is left of the epoch, in its order."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(3)).tolist()
    for world_size in (1, 2, 3, 6):
        monkeypatch.setattr(dist, "get_world_size", lambda world_size=world_size: world_size)
        for samples_run in (0, batch_size, 1001, size):
            shards = []
            for rank in range(world_size):
                monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
                sampler = elastic_ddp.GlobalBatchSampler([0] * size, batch_size, seed=0)
                sampler.set_position(3, samples_run)
                shards.append(list(sampler))
            sampled = []
            for step in zip(*shards, strict=True):
                left = min(batch_size, size - samples_run - len(sampled))
                # A rank that has no share takes the batch's first sample; it weighs nothing.
                step = [share for rank, share in enumerate(step) if rank < left]
                batch = [s for some in zip_longest(*step) for s in some if s is not None]
                assert len(batch) == left
                sampled += batch
            assert sampled == order[samples_run:]


@pytest.mark.parametrize(("ranks", "size", "batch_size"), [(3, 2047, 50), (2, 20, 1)])
def test_uneven_shards(shell, ranks, size, batch_size):
    """50 samples are no multiple of 3, and the last batch has but 47; of 1, rank 1 has none."""
    script = patch(shell.folder, ELASTIC, resize(size))
    job = shell.ranks(f"{script} 4 1 --global_batch_size {batch_size}", ranks)
    output = job.succeeds()
    starts = re.findall(r"rank (\d) of (\d) starts", output)
    assert sorted(starts) == [(str(rank), str(ranks)) for rank in range(ranks)]
    losses = assert_trained(shell.folder / "snapshot.pt", 4, batch_size, size=size)
    logged = [float(loss) for loss in re.findall(r"epoch [1-4] \+ 0 samples \| loss (\S+)", output)]
    assert logged == pytest.approx(losses, rel=1e-3)  # as many digits as there are
    assert load(shell.folder / "snapshot.pt")["loss"] == pytest.approx(losses[-1], rel=1e-6)


@pytest.fixture
def float64_script(shell):
    """A copy of the script that calculates in float64, and a plain loop that does so, too.

    After some thousand steps float32's roundings would hide a fault's traces. A pause in each step
    leaves this machine to those that start.
    """
    setup = "torch.set_default_dtype(torch.float64)\n" + pause(0.02)
    path = patch(shell.folder, OWN_DISKS, setup)
    torch.set_default_dtype(torch.float64)
    yield path
    torch.set_default_dtype(torch.float32)


def start_node(shell, script, node, port):
    """Starts one of up to two nodes by hand, set to notice a death within seconds."""
    return shell.start(
        "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TORCH_CPP_LOG_LEVEL=ERROR\n"
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
        "export PET_RDZV_CONF=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5\n"
        "torchrun --nnodes=1:2 --nproc_per_node=1 --max-restarts=100 --rdzv_backend=c10d"
        f" --rdzv_endpoint=localhost:{port} {script} 100000 100000 --save_every_steps 5",
        node=node,
    )


def wait_for_world(jobs, world_size):
    """Waits until all are in a world of this size, and some steps done."""
    start, deadline = f"of {world_size} starts", time.monotonic() + TIMEOUT_S
    while True:
        tails = [job.output.rpartition("rank ")[2] for job in jobs]
        if all(start in tail for tail in tails) and any(t.count(" samples |") > 2 for t in tails):
            return
        assert time.monotonic() < deadline, "\n".join(job.output for job in jobs)
        assert all(job.process.poll() is None for job in jobs), jobs[0].output
        time.sleep(0.05)


def test_nodes_come_and_go(shell, float64_script):
    """Of two without a shared disk one dies; another comes, which has no snapshot."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    a, b = (start_node(shell, float64_script, name, store.port) for name in "ab")
    wait_for_world([a, b], 2)
    b.end()
    wait_for_world([a], 1)
    c = start_node(shell, float64_script, "c", store.port)
    wait_for_world([a, c], 2)
    for job in (a, c):
        os.kill(job.torchrun(), signal.SIGTERM)
    signaled_at = time.monotonic()
    while a.workers() or c.workers():
        time.sleep(0.05)
    assert time.monotonic() < signaled_at + 25, a.output  # after 30 s, torchrun kills them
    assert a.wait() != 0 and c.wait() != 0
    # Where the newest snapshot ended, the next world began, at the same sample or later.
    logged = [logged_positions(job.output) for job in (a, b, c)]
    assert all(saved == sorted(saved) for saved in logged), logged
    for snapshot in (shell.folder / name / "snapshot.pt" for name in "ac"):
        epochs, samples = position(snapshot)
        assert_trained(snapshot, epochs, 64, 1e-10, samples_run=samples)


def sharing(shell, num_nodes, script, arguments, **variables):
    """Starts a rank on each of some nodes that share a disk; returns them and their snapshot."""
    folders = [shell.folder / name for name in "abc"[:num_nodes]]
    snapshot = shell.folder / "snapshot.pt"
    command = f"{script} {arguments} --snapshot_path {snapshot}"
    return shell.ranks_on(folders, command, **variables), snapshot


@pytest.mark.parametrize("num_nodes", [2, pytest.param(3, marks=pytest.mark.long)])
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
    """Rank 0 dies as it saves, and the others as they save in its place: a file is left of each."""
    setup = "script.os.replace = lambda source, target: os.kill(os.getpid(), 9)"
    for _ in range(2):
        job, snapshot = sharing(shell, 3, patch(shell.folder, SAVE_AFTER_FAILURE, setup), "3 1")
        assert job.wait() == -signal.SIGKILL
        left = sorted(path.name for path in shell.folder.glob("*.tmp"))
        assert left == [f"snapshot.pt.{node}.tmp" for node in range(3)]
    job, snapshot = sharing(shell, 3, ELASTIC, "3 1")
    job.succeeds()
    assert_trained(snapshot, 3, 64)


def test_no_older_snapshot_replaces_a_newer_one(shell):
    """A world that was cut off ends at last: others have trained on and saved meanwhile."""
    job, snapshot = sharing(shell, 3, SAVE_AFTER_FAILURE, "100000 1 --timeout 0.5")
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
        command = f"python {ELASTIC} 3 --timeout 0.02"
        job = shell.start(command, RANK=rank, MASTER_PORT=port, **world)
        assert job.wait() == 1
        assert job.output.splitlines()[-1].startswith(f"torch.distributed.{error}"), job.output
