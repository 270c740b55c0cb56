"""What each recipe claims; and that all of them, as the stages do, resume after a kill."""

import re
import signal

import pytest
import torch
from helpers import (
    BATCH_NORM_AND_DROPOUT,
    KILL,
    MEASURE_MEMORY,
    assert_trained,
    equal_snapshots,
    patch,
    reference_run,
    resize,
    weights_and_momentum,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import singlegpu
from tools.launch.snapshots import load, max_abs_diff
from tools.steps import BY_HAND, RECIPES

NAMES = [step.file for step in RECIPES + BY_HAND]
OPTIONS = {
    "recipes/mixed_precision.py": "--dtype float16",
    "recipes/gradient_accumulation.py": "--batch_size 8 --global_batch_size 64",
}

# What a recipe must cope with beyond the toy: an optimizer that also keeps scalars per tensor; a
# scale that is too large at first.
CHANGES = {
    "recipes/fsdp.py": """
torch.optim.SGD = lambda parameters, lr, momentum: torch.optim.AdamW(parameters)
""",
    "recipes/mixed_precision.py": """
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40)
""",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "recipes/images.py"])
def test_killed_is_uninterrupted(shell, name):
    """Two ranks, killed in mid-epoch and started again, end with the snapshot of two left alone."""
    script = patch(shell.folder, name, KILL + CHANGES.get(name, ""))
    command = f"{script} 6 3 {OPTIONS.get(name, '')} --snapshot_path {shell.folder}"
    uninterrupted = shell.ranks(f"{command}/uninterrupted", 2)
    killed = shell.ranks(f"{command}/killed", 2, KILL_AT="110")  # in the fourth epoch
    assert killed.wait() in (-signal.SIGKILL, -signal.SIGTERM)  # this, once another is gone
    resumed = shell.ranks(f"{command}/killed", 2).succeeds()
    assert "3 of 6 epochs done" in resumed
    uninterrupted.succeeds()
    one, other = (load(shell.folder / path) for path in ("uninterrupted", "killed"))
    assert one["epochs_run"] == 6
    assert equal_snapshots(one, other)
    if name == "recipes/mixed_precision.py":
        assert 1 < one["scaler"]["scale"] < 2**40  # it has left out steps


def test_half_precision_is_as_good(shell):
    """After 10 epochs the loss is that of float32; weights and snapshots are in float32 still."""
    script, float32 = "recipes/mixed_precision.py", reference_run(10, 64)[2]
    for dtype in ("bfloat16", "float16"):
        path = f"{dtype}.pt"
        command = f"{script} 10 1 --dtype {dtype} --snapshot_path {path}"
        losses = re.findall(r"\| loss (\S+) \|", shell.ranks(command, 2).succeeds())
        assert float(losses[-1]) == pytest.approx(float32[-1], rel=0.02)
        snapshot = load(shell.folder / path)
        assert all(weight.dtype == torch.float32 for weight in snapshot["model"].values())
        # Less than float32, or nothing was computed in another dtype.
        assert (
            max_abs_diff(weights_and_momentum(shell.folder / path)[0], reference_run(10, 64)[0])
            > 1e-5
        )
        steps = snapshot["scaler"].get("_growth_tracker", 0)
        assert (0 < steps <= 10 * 32) if dtype == "float16" else snapshot["scaler"] == {}
    # From one dtype to the other, and from a stage's snapshot.
    snapshot = load(shell.folder / "bfloat16.pt")
    del snapshot["scaler"]
    torch.save(snapshot, shell.folder / "plain.pt")
    for path in ("bfloat16.pt", "plain.pt"):
        shell.ranks(f"{script} 11 --dtype float16 --snapshot_path {path}", 2).succeeds()
        assert load(shell.folder / path)["scaler"]["_growth_tracker"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulated_is_one_batch(shell, ranks, size=2024):
    """Micro-batches of 8, of which the epoch's last is short, train like whole batches of 64."""
    setup = COUNT_ALL_REDUCES + resize(size)
    script = patch(shell.folder, "recipes/gradient_accumulation.py", setup)
    output = shell.ranks(f"{script} 3 3 --batch_size 8 --global_batch_size 64", ranks).succeeds()
    assert_trained(shell.folder / "snapshot.pt", 3, 64, size=size)
    assert output.count("an all-reduce") == ranks * 3 * -(-size // 64)  # one a step


COUNT_ALL_REDUCES = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

def counted(state, bucket):
    print("an all-reduce")
    return allreduce_hook(None, bucket)

DDP = nn.parallel.DistributedDataParallel
def ddp_with_hook(model):
    ddp = DDP(model)
    ddp.register_comm_hook(None, counted)
    return ddp
nn.parallel.DistributedDataParallel = ddp_with_hook
"""


def test_batch_that_cannot_be_shared(shell):
    job = shell.ranks("recipes/gradient_accumulation.py 3 --global_batch_size 64", 3)
    job.fails("--global_batch_size must be a multiple of 3 (world size)")


def test_evaluated_by_any_number_of_ranks(shell):
    """The same on 1, 2 and 3 ranks, of which only one can have equally many of 409 samples.

    With BatchNorm and dropout, which evaluate in another way than they train.
    """
    script = patch(shell.folder, "recipes/evaluate.py", BATCH_NORM_AND_DROPOUT)
    logs = [shell.ranks(f"{script} 3 3 --seed 1", 2).succeeds()]
    logs += [shell.ranks(f"{script} 3", ranks).succeeds() for ranks in (1, 3)]
    model = singlegpu.ToyModel()
    model.relu = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(10), nn.Dropout(0.1))
    model.eval()
    model.load_state_dict(load(shell.folder / "snapshot.pt")["model"])
    samples = singlegpu.ToyDataset(2048)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[-409:]
    with torch.no_grad():
        outputs, targets = model(samples.inputs[order]).double(), samples.targets[order]
    loss = ((outputs - targets) ** 2).mean().item()
    accuracy = (outputs.argmax(1) == targets.argmax(1)).double().mean().item()
    for log in logs:
        found = re.findall(r"val loss (\S+), accuracy (\S+)% of 409 samples", log)
        assert float(found[-1][0]) == pytest.approx(loss, rel=1e-6)
        assert float(found[-1][1]) == pytest.approx(100 * accuracy, abs=0.01)
    assert accuracy > 0.5 and loss < 1


def curves(folder):
    """Returns the steps and values of each curve, as TensorBoard itself reads them."""
    reader = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_curves_after_a_kill(shell):
    """Epochs after the last snapshot are trained twice, and drawn once."""
    script = patch(shell.folder, "recipes/tensorboard_logging.py", KILL)
    command = f"{script} 16 8 --batch_size 128"
    log_dir = shell.folder / "snapshot.pt.logs"
    killed = shell.ranks(command, 2, KILL_AT="92")  # in epoch 12
    assert killed.wait() in (-signal.SIGKILL, -signal.SIGTERM)
    assert curves(log_dir)["loss"][-1][0] == 11
    shell.ranks(command, 2).succeeds()
    drawn = curves(log_dir)
    assert set(drawn) == {"loss", "learning_rate"}
    for points in drawn.values():
        assert [step for step, _ in points] == list(range(1, 17))
    losses = reference_run(16, 256)[2]
    assert [value for _, value in drawn["loss"]] == pytest.approx(losses, rel=1e-3, abs=1e-5)
    assert {round(value, 6) for _, value in drawn["learning_rate"]} == {0.01}


def test_each_run_has_its_own_curves(shell):
    """Two snapshots of the same name, in two folders."""
    for folder in ("a", "b"):
        (shell.folder / folder).mkdir()
        command = f"recipes/tensorboard_logging.py 4 --snapshot_path {folder}/s.pt"
        shell.ranks(command).succeeds()
    one, other = (curves(shell.folder / folder / "s.pt.logs")["loss"] for folder in ("a", "b"))
    assert one == other != []


def test_sharded_is_as_replicated(shell):
    """4 ranks train like one; then 2 resume from their snapshot, which is one of whole tensors."""
    for epochs, ranks, batch_size in [(3, 4, 16), (6, 2, 32)]:
        command = f"recipes/fsdp.py {epochs} --batch_size {batch_size}"
        output = shell.ranks(command, ranks).succeeds()
        assert_trained(shell.folder / "snapshot.pt", epochs, 64)
    assert "3 of 6 epochs done" in output


def test_sharded_needs_its_own_snapshot_on_all_nodes(shell):
    """The ranks compare their epochs before they load, since loading takes all of them."""
    folders = [shell.folder / "a", shell.folder / "b"]
    shell.ranks_on(folders[:1], "recipes/fsdp.py 2").succeeds()
    job = shell.ranks_on(folders, "recipes/fsdp.py 4")
    job.fails("ranks start at [(2, 'seed 0, 2048 samples'), (0, 'seed 0, 2048 samples')]: ")
    shell.ranks_on(folders[1:], "multinode.py 2").succeeds()
    job = shell.ranks_on(folders[1:], "recipes/fsdp.py 4")
    job.fails("cannot load snapshot.pt: move it or set another --snapshot_path")
    assert "ValueError('saved without FSDP')" in job.output


DEEP = f"""{MEASURE_MEMORY}{resize(128)}
class Deep(nn.Sequential):
    def __init__(self):
        sizes = [10, *[1536] * 8, 5]
        super().__init__(*(nn.Linear(*pair) for pair in zip(sizes, sizes[1:])))

script.ToyModel = Deep
"""


def test_sharded_takes_less_memory(shell):
    """Measured by the system, as the peak of rank 1 beyond its start, without saving.

    Of the other ranks, since rank 0 holds the whole initial weights on the host. None of rank 1's
    memory is the whole model at any time.
    """
    peak = {}
    for name in ("multinode.py", "recipes/fsdp.py"):
        script = patch(shell.folder, name, DEEP)
        output = shell.ranks(f"{script} 1 1", 2).succeeds()
        peak[name] = int(re.search(r"rank 1 took (\d+)", output)[1])
    assert peak["recipes/fsdp.py"] < 0.65 * peak["multinode.py"], peak


@pytest.mark.parametrize("name", ["recipes/mixed_precision.py", "recipes/fsdp.py"])
def test_snapshot_cannot_be_read_or_written(shell, name):
    """The two that save in another way than multinode.py."""
    (shell.folder / "snapshot.pt").write_text("hello")
    job = shell.ranks(f"{name} 5 {OPTIONS.get(name, '')}")
    job.fails("cannot load snapshot.pt: move it or set another --snapshot_path")
    job = shell.ranks_on(
        [shell.folder], f"{name} 1 --snapshot_path s", full_disk_folders=[shell.folder]
    )
    job.fails("cannot save s: disk full, or file used by another run? [Errno 27] File too large")
