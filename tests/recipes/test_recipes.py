"""What each recipe claims; and that all of them, as the stages do, resume after a kill."""

import json
import re
import signal
import socket
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    BATCH_NORM_AND_DROPOUT,
    FORK,
    KILL,
    LONG,
    MEASURE_MEMORY,
    assert_trained,
    curves,
    equal_snapshots,
    first,
    long,
    module,
    patch,
    read_script,
    reference_run,
    resize,
    run,
    snippet,
    weights_and_momentum,
)
from torch import nn

import singlegpu
from tools.judge.stages import STAGES as JUDGED
from tools.launch.snapshots import load, max_abs_diff
from tools.steps import RECIPES

NAMES = [step.file for step in RECIPES]
OPTIONS = {
    "recipes/mixed_precision.py": "--batch_size 128 --dtype float16",
    "recipes/gradient_accumulation.py": "--batch_size 128 --micro_batch_size 32",
    "recipes/images.py": "",
}
KILL_AT = {"recipes/images.py": "100"}  # of the others, an epoch has eight steps
# Where the first image is brightest, in each epoch.
PRINT_SHIFT = """
@after(script.Trainer, "_run_epoch")
def print_shift(self, epoch):
    print("brightest at", self.train_loader.dataset[0][0].argmax().item())
"""
# What a recipe must cope with beyond the toy: an optimizer that also keeps scalars per tensor; a
# scale that is too large at first.
CHANGES = {
    "recipes/fsdp.py": """
torch.optim.SGD = lambda parameters, lr, momentum: torch.optim.AdamW(parameters)
""",
    "recipes/mixed_precision.py": """
torch.amp.GradScaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40)
""",
    "recipes/images.py": FORK + PRINT_SHIFT,
}
QUICK = ["recipes/mixed_precision.py", "recipes/fsdp.py", "recipes/monitor.py"]
# The judge's check `restart` looks at the others.
LONGER = [name for name in NAMES if name not in QUICK and name.removesuffix(".py") not in JUDGED]


@pytest.mark.parametrize("name", [*QUICK, *long(*LONGER)])
def test_killed_is_uninterrupted(shell, name):
    """Two ranks, killed in mid-epoch and started again, end with the snapshot of two left alone.

    Also if those that were killed had data workers.
    """
    script = patch(shell.folder, name, KILL + CHANGES.get(name, ""))
    options = OPTIONS.get(name, "--batch_size 128")
    command = f"{script} 6 3 {options} --snapshot_path {shell.folder}"
    uninterrupted = shell.ranks(f"{command}/uninterrupted", 2)
    workers = "--num_workers 1" if name == "recipes/images.py" else ""
    killed = shell.ranks(f"{command}/killed {workers}", 2, KILL_AT=KILL_AT.get(name, "28"))
    assert killed.wait() in (-signal.SIGKILL, -signal.SIGTERM)  # this, once another is gone
    resumed = shell.ranks(f"{command}/killed", 2).succeeds()
    assert "3 of 6 epochs done" in resumed
    uninterrupted.succeeds()
    one, other = (load(shell.folder / path) for path in ("uninterrupted", "killed"))
    assert one["epochs_run"] == 6
    assert equal_snapshots(one, other)
    if name == "recipes/mixed_precision.py":
        assert 1 < one["scaler"]["scale"] < 2**40  # it has left out steps
    if name == "recipes/images.py":
        assert len(set(re.findall(r"brightest at \d+", resumed))) > 1
        assert float(re.findall(r"accuracy (\S+)% of 359 samples", resumed)[-1]) > 80


@pytest.mark.long
def test_half_precision_is_as_good(shell):
    """After 6 epochs the loss is that of float32; weights and snapshots are in float32 still."""
    script = "recipes/mixed_precision.py"
    float32_weights, _, float32_losses = reference_run(6, 64)
    for dtype in ("bfloat16", "float16"):
        path = f"{dtype}.pt"
        command = f"{script} 6 1 --dtype {dtype} --snapshot_path {path}"
        losses = re.findall(r"\| loss (\S+) \|", shell.ranks(command, 2).succeeds())
        assert float(losses[-1]) == pytest.approx(float32_losses[-1], rel=0.02)
        snapshot = load(shell.folder / path)
        assert all(weight.dtype == torch.float32 for weight in snapshot["model"].values())
        # Less than float32, or nothing was computed in another dtype.
        weights, _ = weights_and_momentum(shell.folder / path)
        assert max_abs_diff(weights, float32_weights) > 1e-5
        steps = snapshot["scaler"].get("_growth_tracker", 0)
        assert (0 < steps <= 6 * 32) if dtype == "float16" else snapshot["scaler"] == {}
    # From one dtype to the other.
    options = "--batch_size 512 --dtype float16 --snapshot_path bfloat16.pt"
    shell.ranks(f"{script} 7 {options}", 2).succeeds()
    assert load(shell.folder / "bfloat16.pt")["scaler"]["_growth_tracker"] > 0


@pytest.mark.parametrize("ranks", [1, *long(2)])
def test_accumulated_is_one_batch(shell, ranks, size=2024):
    """Micro-batches of 8, of which the epoch's last is short, train like whole batches of 64."""
    forward_size = 'lambda self, inputs: print("forward of", len(inputs))'
    setup = f"{resize(size)}before(script.ToyModel, 'forward')({forward_size})"
    setup += read_script("count_buckets.py")
    script = patch(shell.folder, "recipes/gradient_accumulation.py", setup)
    batches = f"--batch_size {64 // ranks} --micro_batch_size 8"
    output = shell.ranks(f"{script} 3 3 {batches}", ranks).succeeds()
    losses = assert_trained(shell.folder / "snapshot.pt", 3, 64, size=size)
    logged = float(re.search(r"epoch 3 \| loss (\S+)", output)[1])
    assert logged == pytest.approx(losses[-1], rel=1e-3)
    assert output.count(f"{3 * -(-size // 64)} buckets") == ranks  # one a step
    assert max(map(int, re.findall(r"forward of (\d+)", output))) == 8  # is all in memory


# With data workers, they alone load samples, for evaluation as well, and in batches.
NO_LOADING_BY_RANK = """
@before(script.ToyDataset, "__getitem__")
def note_loading(self, index):
    assert torch.utils.data.get_worker_info() or "--num_workers" not in sys.argv

@before(script.ToyModel, "forward")
def note_size(self, inputs):
    assert len(inputs) > 1
"""


@pytest.mark.long
def test_evaluated_by_any_number_of_ranks(shell):
    """The same on 1, 2 and 3 ranks, of which only one can have equally many of 409 samples.

    With BatchNorm and dropout, which evaluate in another way than they train.
    """
    setup = FORK + BATCH_NORM_AND_DROPOUT + NO_LOADING_BY_RANK
    script = patch(shell.folder, "recipes/evaluate.py", setup)
    logs = [shell.ranks(f"{script} 3 3 --seed 1 --num_workers 1", 2).succeeds()]
    logs += [shell.ranks(f"{script} 3", ranks).succeeds() for ranks in (1, 3)]
    model = singlegpu.ToyModel()
    model.relu = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(10), nn.Dropout(0.1))
    model.eval()
    weights = load(shell.folder / "snapshot.pt")["model"]
    assert weights["relu.1.num_batches_tracked"] == 3 * 26  # all, in training mode
    model.load_state_dict(weights)
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


@pytest.mark.long
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


@pytest.mark.long
def test_sharded_is_as_replicated(shell):
    """4 ranks train like one; then 2 resume from their snapshot, which is one of whole tensors."""
    for epochs, ranks, batch_size in [(2, 4, 64), (4, 2, 128)]:
        command = f"recipes/fsdp.py {epochs} --batch_size {batch_size}"
        output = shell.ranks(command, ranks).succeeds()
        assert_trained(shell.folder / "snapshot.pt", epochs, 256)
    assert "2 of 4 epochs done" in output


@pytest.mark.long
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


@pytest.mark.long
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
    job.fails(
        "cannot save s: full disk, another run, or not plain numbers? OSError(27, 'File too large')"
    )


# monitor.py and stragglers.py: a plain loop's numbers, slow data, and which rank is slow.

SLOW_RANK = read_script("slow_rank.py")


def logged(output):
    """Returns the numbers of each line by name, and what it says of a rank, by step."""
    lines = re.findall(r"^step (\d+) \| (.*?)(?: \| (\w+: rank .*))?$", output, re.MULTILINE)
    return {
        int(step): ({k: float(v) for k, v in re.findall(r"(\w+) (\S+)", values)}, named)
        for step, values, named in lines
    }


def plain_loop(steps):
    """Returns the loss and the norm of the gradient of each step, in one process without DDP."""
    dataset = singlegpu.ToyDataset(2048)
    torch.manual_seed(0)
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    found = []
    for batch in order.split(64)[:steps]:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(dataset.inputs[batch]), dataset.targets[batch])
        loss.backward()
        optimizer.step()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        found.append((loss.item(), norm.item()))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, ["recipes/stragglers.py", "recipes/monitor.py"]))
def test_numbers_of_a_run_with_slow_data(shell, name):
    """They log the plain loop's numbers; and for stragglers.py, rank 1 is slow."""
    setup = read_script("slow_data.py") + read_script("unused_parameter.py")
    script = patch(shell.folder, name, setup)
    lines = logged(shell.ranks(f"{script} 1 --log_every 8", 2).succeeds())
    assert list(lines) == [8, 16, 24, 32]
    reference = plain_loop(32)
    for step, (numbers, named) in lines.items():
        loss, norm = reference[step - 1]
        assert numbers["loss"] == pytest.approx(loss, rel=1e-3)
        assert numbers["gradient_norm"] == pytest.approx(norm, rel=1e-3)
        assert numbers["learning_rate"] == 0.01
        assert 50 < numbers["samples_per_second"] < 64 / 0.032
        assert 1.05 < numbers["peak_memory_gb"] < 5
        assert 0.4 < numbers["data_share"] <= 1
        if name == "recipes/stragglers.py":
            assert numbers["median_rank_ms"] < 32 < numbers["slowest_rank_ms"]
            assert named == f"straggler: rank 1 on {socket.gethostname()}"
    drawn = curves(shell.folder / "snapshot.pt.logs")
    assert drawn.keys() == lines[16][0].keys()
    for curve, points in drawn.items():
        printed = {step: numbers[curve] for step, (numbers, _) in lines.items()}
        assert dict(points) == pytest.approx(printed, rel=1e-4)
    resumed = logged(shell.ranks(f"{script} 2 --log_every 20", 2).succeeds())
    assert list(resumed) == [40, 60]
    for numbers, _ in resumed.values():  # of 40, over 8 steps: none counts those of the run before
        assert 50 < numbers["samples_per_second"] < 64 / 0.032
    drawn = curves(shell.folder / "snapshot.pt.logs")
    assert [step for step, _ in drawn["loss"]] == [8, 16, 24, 32, 40, 60]
    fewer = logged(shell.ranks(f"{script} 3 --log_every 20 --batch_size 64", 2).succeeds())
    assert list(fewer) == [80]  # after two epochs of 32 steps


@pytest.mark.nightly
@pytest.mark.parametrize("is_slow", [True, False])
def test_slow_rank_is_named(shell, is_slow):
    """Each of three, in a run of 100 steps; and no rank is, in three runs without."""
    script = patch(shell.folder, "recipes/stragglers.py", SLOW_RANK)
    for rank in range(3):
        variables = {"SLOW_RANK": str(rank)} if is_slow else {}
        command = f"{script} 1 --batch_size 6 --snapshot_path {rank}.pt"  # 114 steps
        output = shell.ranks(command, 3, **variables).succeeds()
        assert list(logged(output)) == [50, 100]
        named = set(re.findall(r"straggler: rank (\d)", output))
        assert named == set(variables.values()), output


def test_busy_times_of_earlier_lines_do_not_count():
    """A rank that has become slow is seen in the next line."""
    times = [(0, 1)] * 3
    trainer = SimpleNamespace(device=torch.device("cpu"), busy_times=times)
    for seconds in (1, 2):
        times.append((0, seconds))
        assert module("recipes/stragglers.py").Trainer._busy_ms(trainer) == 1000 * seconds


# profiler.py: a trace of three steps of rank 0.


def events(trace):
    """Returns the events of a trace with a duration, in the order in which they began."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])


def named(events, pattern):
    return [event for event in events if re.match(pattern, event["name"])]


def end(event):
    return event["ts"] + event["dur"]


PHASES = (
    r"enumerate\(DataLoader\)#.*__next__",
    r"DistributedDataParallel\.forward",
    r"MseLossBackward0",
    r"Optimizer\.step#SGD\.step",
)


@pytest.mark.long
def test_trace_of_three_steps(shell):
    """Only rank 0 writes, each phase is there once per step, and all-reduces begin in backward.

    The page's command makes a model whose gradients fill two of DDP's buckets. The ranks share no
    folder, so that it shows which of them writes.
    """
    sed = snippet("recipes/profiler.md", "> wide.py", "sh").partition("torchrun")[0]
    sed = sed.replace("> wide.py", f"> {shell.folder}/wide.py")
    assert run("sh", "-c", sed).returncode == 0
    folders = [shell.folder / "rank0", shell.folder / "rank1"]
    output = shell.ranks_on(folders, f"{shell.folder}/wide.py 1 1 --snapshot_path p.pt").succeeds()
    assert output.count("saving the trace to p.pt.trace.json\n") == 1
    assert [path.name for path in shell.folder.rglob("*trace*")] == ["p.pt.trace.json"]
    assert not list(folders[1].glob("p.pt*"))
    found = events(folders[0] / "p.pt.trace.json")
    steps = named(found, "ProfilerStep")
    assert [step["name"] for step in steps] == [f"ProfilerStep#{n}" for n in (7, 8, 9)]
    for step in steps:
        inside = [event for event in found if step["ts"] <= event["ts"] < end(step)]
        assert [len(named(inside, pattern)) for pattern in PHASES] == [1] * len(PHASES)
        all_reduces = named(inside, "c10d::allreduce_")
        backward = named(inside, "autograd::engine::evaluate_function")
        assert len(all_reduces) == 2
        assert backward[0]["ts"] < all_reduces[0]["ts"] < backward[-1]["ts"]


@pytest.mark.parametrize("steps, profiled", [(3, 0), (6, 0), (8, 1)])
def test_run_shorter_than_the_schedule(shell, steps, profiled):
    """An epoch is one step. What is profiled by the end is saved; training is as without it."""
    options = f"{steps} {steps} --batch_size 2048"
    shell.ranks(f"recipes/profiler.py {options}").succeeds()
    shell.ranks(f"multinode.py {options} --snapshot_path plain.pt").succeeds()
    one, other = (load(shell.folder / name) for name in ("snapshot.pt", "plain.pt"))
    assert equal_snapshots(one, other)
    traces = list(shell.folder.glob("*.trace.json"))
    assert len(traces) == min(profiled, 1)
    for trace in traces:
        assert len(named(events(trace), r"Optimizer\.step#")) == profiled


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("recipes/evaluate.py", "_evaluate", ""),
        pytest.param("preemptible.py", "_run_batch", "--save_every_steps 4", marks=LONG),
        pytest.param("preemptible.py", "_run_epoch", "--save_every_steps 4", marks=LONG),
        pytest.param("recipes/images.py", "_evaluate", "", marks=LONG),
    ],
)
def test_a_schedule_is_saved_after_its_step(shell, name, method, options):
    """Killed right after any save, a run ends as an unbroken one: no step of a schedule is lost."""
    script = patch(shell.folder, name, read_script("schedule.py"))
    for saves in ("0", "1", "2", "3"):  # of preemptible.py, the last one is the epoch's own
        job = f"{script} 3 1 {options} --batch_size 128 --snapshot_path {saves}.pt"
        if saves != "0":
            shell.ranks(job, 2, STEPS_AFTER=method, KILL_AFTER=saves).fails()
        shell.ranks(job, 2, STEPS_AFTER=method).succeeds()
        unbroken, resumed = (load(shell.folder / f"{n}.pt") for n in ("0", saves))
        assert equal_snapshots(unbroken["optimizer"], resumed["optimizer"]), saves
        assert equal_snapshots(unbroken["model"], resumed["model"]), saves


@pytest.mark.parametrize("name", ["recipes/stragglers.py", "recipes/tensorboard_logging.py"])
def test_trains_as_one_process(shell, name):
    shell.ranks(f"{patch(shell.folder, name, resize(256))} 2 1 --batch_size 32", 2).succeeds()
    assert_trained(shell.folder / "snapshot.pt", 2, 64, size=256)
