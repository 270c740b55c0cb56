"""elastic_ddp.py: nodes come and go, every sample counts once, and the weights are the same."""

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
    LOG_LOSSES,
    SIGNAL,
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
from tools.launch.jobs import TIMEOUT_S, free_port
from tools.launch.snapshots import load, logged_positions, max_abs_diff

SCRIPT = "elastic_ddp.py"
OWN_DISKS = "recipes/own_disks.py"
STEPS = 32  # per epoch: global batches of 64 of 2048 samples


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
    script = patch(shell.folder, SCRIPT, resize(size))
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
    # No step was lost: where one snapshot ended the next world began, at the same sample or later.
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
    script = patch(shell.folder, SCRIPT, SIGNAL + DROPOUT + LOG_LOSSES)
    job, undisturbed = sharing(shell, num_nodes, script, "3 1 --save_every_steps 1")
    undisturbed_losses = logged_losses(job.succeeds())
    undisturbed = undisturbed.rename(shell.folder / "undisturbed.pt")
    losses, chosen = {}, sorted(random.sample(range(1, 3 * STEPS), kills))
    for step in chosen:
        rank = random.randrange(num_nodes)
        print("kills rank", rank, "before step", step)
        killed_at = (step // STEPS, step % STEPS * 64)
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
        is_estimate = epochs - (samples == 0) in [step // STEPS for step in chosen]
        expected = undisturbed_losses[epochs, samples]
        assert loss == pytest.approx(expected, rel=0.5 if is_estimate else 1e-6)


def test_killed_while_saving(shell):
    """Rank 0 dies as it saves, and the others as they save in its place: a file is left of each."""
    setup = "script.os.replace = lambda source, target: os.kill(os.getpid(), 9)"
    for _ in range(2):
        job, snapshot = sharing(shell, 3, patch(shell.folder, SCRIPT, setup), "3 1")
        assert job.wait() == -signal.SIGKILL
        left = sorted(path.name for path in shell.folder.glob("*.tmp"))
        assert left == [f"snapshot.pt.{node}.tmp" for node in range(3)]
    job, snapshot = sharing(shell, 3, SCRIPT, "3 1")
    job.succeeds()
    assert_trained(snapshot, 3, 64)


def test_no_older_snapshot_replaces_a_newer_one(shell):
    """A world that was cut off ends at last: others have trained on and saved meanwhile."""
    job, snapshot = sharing(shell, 3, SCRIPT, "100000 1 --timeout 0.5")
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
        command = f"python {SCRIPT} 3 --timeout 0.02"
        job = shell.start(command, RANK=rank, MASTER_PORT=port, **world)
        assert job.wait() == 1
        assert job.output.splitlines()[-1].startswith(f"torch.distributed.{error}"), job.output
