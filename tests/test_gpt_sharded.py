"""The files of gpt/ that shard: the same weights as pretrain.py's on one rank, in less memory."""

import difflib
import math
import re
import shutil
import signal

import pytest
import torch
from helpers import (
    LIMIT_MEMORY,
    LOG_LOSSES,
    MEASURE_MEMORY,
    NIGHTLY,
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    VAL_CHUNKS,
    equal_snapshots,
    fences,
    long,
    patch,
    run,
)

from tools.launch.snapshots import load, load_gpt, max_abs_diff, write_text
from tools.steps import ROOT

BATCH_SIZE = 12  # of all ranks together, on 1, 2, 3 or 4
STEPS = 20  # per epoch
SMALL = "--n_layer 1 --n_head 4 --n_embd 32 --context 8"

# AdamW turns a gradient that is nearly 0 into a whole step, and so rounding errors into differences
# of 1e-4. In float64 they stay small.
FLOAT64 = """
torch.set_default_dtype(torch.float64)
clip_grad_norm_ = nn.utils.clip_grad_norm_
def clip_and_log(parameters, max_norm, **options):
    norm = clip_grad_norm_(parameters, max_norm, **options)
    print("clipped" if norm > max_norm else "not clipped")
    return norm
nn.utils.clip_grad_norm_ = clip_and_log
"""


def write_script(shell, name, setup=""):
    return patch(shell.folder, f"gpt/{name}", SHORT_GPT + setup)


def start(shell, name, snapshot, ranks=1, setup="", options="", steps=STEPS, **variables):
    """Starts an epoch of some steps, with the same global batches on any number of ranks."""
    write_text(shell.folder / "text", steps * BATCH_SIZE + VAL_CHUNKS, 8)
    sizes = map(int, re.findall(r"--[tpc]p_size (\d+)", options))  # of ranks that share samples
    batch_size = BATCH_SIZE * math.prod(sizes) // ranks
    options = f"{SHORT_VAL} {options} --batch_size {batch_size}"
    options += f" --text text --snapshot_path {snapshot}"
    command = f"{write_script(shell, name, setup)} 1 1 {SMALL} {options}"
    return shell.ranks(command, ranks, **variables)


def weights_diff(shell, snapshot, reference):
    """Returns the largest difference between the weights of two snapshots."""
    model, other = (load_gpt(shell.folder / path)["model"] for path in (snapshot, reference))
    assert model.keys() == other.keys()
    assert all(tensor.dtype == other[name].dtype for name, tensor in model.items())
    return max_abs_diff([model[name] for name in other], other.values())


LAYOUTS = {  # ranks and options
    "accumulate.py": [(2, "--micro_batch_size 4")],  # and one of 2
    "hsdp.py": [(4, "--shard_size 2 --recompute")],
    "tensor_parallel.py": [(4, "--tp_size 2")],
    "pipeline_parallel.py": [
        (3, "--pp_size 3 --micro_batches 4"),
        (4, "--pp_size 2 --micro_batches 3"),
    ],
    "context_parallel.py": [(4, "--cp_size 4"), (4, "--cp_size 2")],
    "three_d.py": [(8, "--pp_size 2 --tp_size 2 --micro_batches 3")],
    "moe.py": [(2, "--recompute --eval_every_steps 3"), (4, "")],
    "expert_parallel.py": [(2, ""), (4, "--recompute --eval_every_steps 3")],
}


LAYERS = {"pipeline_parallel.py": "--n_layer 4", "three_d.py": "--n_layer 2"}  # of others, one


def reference(name):
    """Returns the file whose weights on one rank those of `name` must equal."""
    return "moe.py" if name in ("moe.py", "expert_parallel.py") else "pretrain.py"


SLOWEST = [
    "context_parallel.py",
    "accumulate.py",
    "three_d.py",
    "moe.py",
    "expert_parallel.py",
    "pipeline_parallel.py",
]
OTHERS = [name for name in LAYOUTS if name not in SLOWEST]


@pytest.mark.parametrize("name", [*OTHERS, *long(*SLOWEST)])
def test_split_is_one_rank(shell, name):
    """The weights after 20 steps, and the loss, of one rank and of several.

    In float64 with AdamW and clipping; and in float32 with neither, as both would hide it if the
    gradients of all steps were, say, twice too large.
    """
    layers = LAYERS.get(name, "")
    options = f"{layers} --learning_rate 0.02"
    assert_equal_weights(shell, name, LAYOUTS[name], FLOAT64, options, 1e-12)
    options = f"{layers} --learning_rate 0.3"
    assert_equal_weights(shell, name, LAYOUTS[name][-1:], PLAIN_SGD, options, 5e-5)


# In the weights' type, and for the same matrices.
TORCH_MUON = """
torch.Tensor.bfloat16 = lambda self: self  # to which torch's Muon would cast
configure_adamw = script.configure_optimizer
def configure(model, learning_rate):
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = configure_adamw(model, learning_rate)
    def step_first(optimizer, *arguments):
        muon.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        muon.step()
        muon.zero_grad()  # AdamW then leaves them alone
    adamw.register_step_pre_hook(step_first)
    return adamw
script.configure_optimizer = configure
"""


@pytest.mark.long
def test_muon_is_torchs(shell):
    """Three matrices of each shape, on fewer ranks, as many and more; 32 rows, not all alike."""
    options = "--n_layer 3 --learning_rate 0.02"
    layouts = [(2, "--recompute"), (3, ""), (4, "")]
    assert_equal_weights(shell, "muon.py", layouts, FLOAT64, options, 1e-12)
    assert_equal_weights(shell, "muon.py", [(3, "")], "", options, 5e-5)


def val_loss(output):
    """Returns the last loss on the validation set in the log, of four digits."""
    return float(re.findall(r"val loss (\S+),", output)[-1])


def assert_equal_weights(shell, name, layouts, setup, options, tolerance):
    twin = setup + (TORCH_MUON if name == "muon.py" else "")
    output = start(shell, reference(name), "one.pt", setup=twin, options=options).succeeds()
    if setup == FLOAT64:
        assert 0 < output.count("\nclipped") < STEPS
    for ranks, option in layouts:
        job = start(shell, name, "several", ranks, setup, f"{options} {option}")
        assert val_loss(job.succeeds()) == pytest.approx(val_loss(output), rel=1e-3)
        diff = weights_diff(shell, "several", "one.pt")
        print(name, ranks, option, "differs from one rank by", diff)
        assert diff < tolerance
        losses = [load_gpt(shell.folder / path)["loss"] for path in ("several", "one.pt")]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)
        run("rm", "-r", "several", folder=shell.folder)
    run("rm", "-r", "one.pt", folder=shell.folder)


FORCE_BFLOAT16 = "torch.cuda.is_bf16_supported = lambda including_emulation: True"


@pytest.mark.parametrize(
    "name",
    [
        "fsdp.py",
        *long(
            "hsdp.py",
            "accumulate.py",
            "async_save.py",
            "tensor_parallel.py",
            "pipeline_parallel.py",
            "context_parallel.py",
            "three_d.py",
            "local_sgd.py",
        ),
    ],
)
def test_bfloat16(shell, name):
    """Forced on CPUs: about the loss of pretrain.py in float32; all that is saved is float32."""
    options = f"{LAYERS.get(name, '')} --learning_rate 0.02"
    ranks, option = LAYOUTS.get(name, [(2, "")])[-1]
    twin = start(shell, "pretrain.py", "one.pt", options=options)
    start(shell, name, "several", ranks, FORCE_BFLOAT16, f"{options} {option}").succeeds()
    twin.succeeds()
    snapshot, expected = (load_gpt(shell.folder / path) for path in ("several", "one.pt"))
    print(name, "has a loss of", snapshot["loss"], "in float32", expected["loss"])
    assert 0 < abs(snapshot["loss"] / expected["loss"] - 1) < 0.01
    state = snapshot.get("node_0", snapshot)
    for tensors in (state["model"], state["optimizer"]):
        assert {t.dtype for t in tensors.values() if isinstance(t, torch.Tensor)} == {torch.float32}


# Compiles without generating code; counts what it is given, and why Dynamo cuts.
COUNT_GRAPHS = """
from torch._dynamo.utils import counters
graphs = []
def count(graph, inputs):
    graphs.append(graph)
    return graph
torch.compile = functools.partial(torch.compile, backend=count)
@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    print(len(graphs), "graphs, breaks:", dict(counters["graph_break"]))
"""


@pytest.mark.parametrize(
    "name", ["fsdp.py", *long("pretrain.py", "tensor_parallel.py", "context_parallel.py")]
)
def test_compiled(shell, name):
    """Two graphs in all: one of all blocks, which are larger than DDP's buckets, and the loss."""
    options = "--compile --n_layer 4 --n_embd 256 --eval_every_steps 1000"
    ranks, option = LAYOUTS.get(name, [(2, "")])[-1]
    job = start(shell, name, "compiled", ranks, COUNT_GRAPHS, f"{options} {option}", steps=3)
    found = re.findall(r"\d+ graphs, breaks: .*", job.succeeds())
    assert found == ["2 graphs, breaks: {}"] * (3 * ranks)


RESUMED = {  # each goes on with what the one before has saved
    "sharded": [  # and by DDP
        ("dcp.py", 2, ""),
        ("fsdp.py", 3, "--recompute"),
        ("tensor_parallel.py", 4, "--tp_size 2"),
        ("dcp.py", 1, ""),
    ],
    "pipeline": [
        ("pipeline_parallel.py", 2, "--pp_size 2 --micro_batches 2"),
        ("hsdp.py", 4, "--shard_size 2"),
        ("pipeline_parallel.py", 4, "--pp_size 4 --micro_batches 4"),
        ("pipeline_parallel.py", 1, "--micro_batches 1"),
    ],
}
RESUMED_LONG = {
    "context": [
        ("context_parallel.py", 2, "--cp_size 2"),
        ("fsdp.py", 1, ""),
        ("context_parallel.py", 4, "--cp_size 2"),
        ("context_parallel.py", 2, ""),
    ],
    "three_d": [
        ("three_d.py", 8, "--pp_size 2 --tp_size 2 --micro_batches 3"),
        ("fsdp.py", 2, ""),
        ("three_d.py", 4, "--pp_size 2 --tp_size 2 --micro_batches 3"),
        ("fsdp.py", 2, ""),
    ],
    "experts": [
        ("expert_parallel.py", 2, ""),
        ("moe.py", 3, "--recompute"),
        ("expert_parallel.py", 4, ""),
        ("moe.py", 2, ""),
    ],
    "muon": [
        ("muon.py", 2, ""),
        ("muon.py", 3, "--recompute"),
        ("muon.py", 1, ""),
        ("muon.py", 4, ""),
    ],
}


@pytest.mark.parametrize(
    "runs", [*RESUMED.values(), *long(*RESUMED_LONG.values())], ids=[*RESUMED, *RESUMED_LONG]
)
def test_stopped_and_resumed_on_other_ranks(shell, runs):
    """Three are stopped by a signal in mid-epoch; the last trains the end."""
    layers = " --n_layer 4" if "--pp_size" in runs[0][2] else ""
    steps = 2 * STEPS
    one_rank = reference(runs[0][0])
    setup = FLOAT64 + (TORCH_MUON if runs[0][0] == "muon.py" else "")
    start(shell, one_rank, "one.pt", setup=setup, options=layers, steps=steps).succeeds()
    stops = [(3, 10), (18, 20), (21, 30)]  # step of the signal, and of the stop
    for (name, ranks, options), (signal_step, stop_step) in zip(runs, stops, strict=False):
        where = {"SIGNAL": "15", "SIGNAL_AT": f"0 {signal_step * BATCH_SIZE}"}
        setup = FLOAT64 + SIGNAL
        job = start(shell, name, "several", ranks, setup, options + layers, steps, **where)
        job.fails("stopped by a signal")
        assert f"epoch 0 + {stop_step * BATCH_SIZE} samples | " in job.output
    name, ranks, options = runs[-1]
    start(shell, name, "several", ranks, FLOAT64, options + layers, steps).succeeds()
    diff = weights_diff(shell, "several", "one.pt")
    print("stopped and resumed differs by", diff)
    assert diff < 1e-12


def test_schedule_by_hand(shell):
    """The one on the page, in place of the library's."""
    (schedule,) = fences("gpt/pipeline_parallel.md", "python")
    setup = f"""{FLOAT64}
dist = script.dist
{schedule}
script.Schedule1F1B = Schedule1F1B
script.Trainer._evaluate = lambda self: None
"""
    options = "--n_layer 4 --learning_rate 0.02"
    start(shell, "pretrain.py", "one.pt", setup=FLOAT64, options=options).succeeds()
    options += " --pp_size 4 --micro_batches 6"
    start(shell, "pipeline_parallel.py", "several", 4, setup, options).succeeds()
    assert weights_diff(shell, "several", "one.pt") < 1e-12


@pytest.mark.long
def test_loss_parallelism(shell):
    """With the lines of the page in place of those that are most like them."""
    lines = (ROOT / "gpt" / "tensor_parallel.py").read_text().splitlines()
    (shown,) = fences("gpt/tensor_parallel.md", "python")
    for change in re.split(r"\n?# in .*\n", shown.rstrip())[1:]:
        (old,) = difflib.get_close_matches(change.splitlines()[-1], lines, 1)
        lines[lines.index(old)] = change
    (shell.folder / "changed").write_text("\n".join(lines))
    changed = "exec(open('changed').read(), script.__dict__)" + SHORT_GPT
    for ranks, setup, rate, tolerance in ((4, FLOAT64, 0.02, 1e-12), (2, PLAIN_SGD, 0.3, 5e-5)):
        options = f"--learning_rate {rate}"
        start(shell, "pretrain.py", "one.pt", 1, setup, options).succeeds()
        options += " --tp_size 2"
        start(shell, "tensor_parallel.py", "several", ranks, changed + setup, options).succeeds()
        diff = weights_diff(shell, "several", "one.pt")
        print("loss parallelism differs from pretrain.py by", diff)
        assert diff < tolerance
        shutil.rmtree(shell.folder / "several")
        (shell.folder / "one.pt").unlink()


def test_more_ranks_than_val_chunks(shell):
    """Both ranks take the one chunk there is, and its loss is that of a single rank."""
    losses = []
    for ranks in (1, 2):
        options = "--val_tokens 8"
        job = start(shell, "fsdp.py", f"of_{ranks}", ranks, options=options, steps=2)
        losses.append(val_loss(job.succeeds()))
    assert 0 < losses[0] < 6  # chance: log(256) = 5.5
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


# The second snapshot stays incomplete: .metadata, the last of its files, is never written.
HOLD_SECOND_SAVE = """
from torch.distributed.checkpoint import FileSystemWriter
@before(FileSystemWriter, "finish")
def hold(self, metadata, results):
    if self.path.name.endswith("_000000000120"):
        print("holding")
        time.sleep(10**6)
"""


@pytest.mark.parametrize("name", ["fsdp.py", "async_save.py"])
def test_killed_while_it_saves(shell, name):
    """The snapshot before is resumed exactly; the incomplete one goes, the user's copy stays."""
    options = "--save_every_steps 5"
    job = start(shell, name, "killed", 2, setup=HOLD_SECOND_SAVE, options=options)
    job.wait_for("holding")
    job.signal(signal.SIGKILL)
    job.wait()
    folder = shell.folder / "killed"
    first, second = sorted(folder.iterdir())
    assert (first.name, second.name) == (
        "epoch_0000_sample_000000000060",
        "epoch_0000_sample_000000000120",
    )
    assert (second / "__0_0.distcp").exists() and not (second / ".metadata").exists()
    shutil.copytree(first, folder / "epoch_best")
    output = start(
        shell, name, "killed", 2, setup=LOG_LOSSES, options="--save_every_steps 10"
    ).succeeds()
    assert "at 0 + 180 " in output  # 10 steps after the first snapshot
    start(shell, name, "uninterrupted", 2).succeeds()
    kept = ["epoch_0000_sample_000000000180", "epoch_0001_sample_000000000000", "epoch_best"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    shutil.rmtree(folder / "epoch_best")
    one, other = (load_gpt(shell.folder / path) for path in ("killed", "uninterrupted"))
    assert one.pop("loss") == pytest.approx(other.pop("loss"), rel=1e-6)
    assert equal_snapshots(one, other)


# The data of the first snapshot is written three steps later.
WRITE_LATE = """
from torch.distributed.checkpoint import FileSystemWriter
steps = []
@before(FileSystemWriter, "write_data")
def write_late(self, plan, planner):
    while len(steps) < 13:
        time.sleep(0.01)
    print("writing", self.path.name)
@after(script.Trainer, "_run_batch")
def count(self, inputs, targets):
    print("trained", self.samples_run)
    steps.append(self.samples_run)
"""


def test_trains_on_while_it_saves(shell):
    """What it saves is the state at the beginning, of which it has a copy: that of fsdp.py."""
    options = "--save_every_steps 10"
    stop = {"SIGNAL": str(int(signal.SIGTERM)), "SIGNAL_AT": f"0 {13 * BATCH_SIZE}"}
    setup = WRITE_LATE + SIGNAL
    job = start(shell, "async_save.py", "s", 2, setup, options, steps=30, **stop)
    job.fails("stopped by a signal")
    before, _, after = job.output.partition("writing epoch_0000_sample_000000000120")
    assert f"trained {13 * BATCH_SIZE}" in before and f"trained {20 * BATCH_SIZE}" in after
    start(shell, "fsdp.py", "fsdp", 2, SIGNAL, options, steps=30, **stop).wait()
    for step in (20, 10):
        one, other = (load_gpt(shell.folder / path) for path in ("s", "fsdp"))
        assert one["samples_run"] == step * BATCH_SIZE
        assert equal_snapshots(one, other)
        for path in ("s", "fsdp"):
            shutil.rmtree(shell.folder / path / f"epoch_0000_sample_{step * BATCH_SIZE:012}")


@pytest.mark.parametrize("name", ["fsdp.py", "async_save.py"])
def test_full_disk(shell, name):
    write_text(shell.folder / "text", 100, 8)
    folders = [shell.folder] * 2
    command = f"{write_script(shell, name)} 1 {SMALL} {SHORT_VAL} --text text --snapshot_path s"
    job = shell.ranks_on(folders, command, full_disk_folders=folders)
    error = "used by another run? CheckpointException('write', {0: (RuntimeError("
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ", error)
    assert "Traceback" not in job.output


def test_snapshots_need_a_shared_disk(shell):
    """Each rank writes its own shards, but only the folder of rank 0 has .metadata."""
    folders = [shell.folder / "a", shell.folder / "b"]
    write_text(shell.folder / "text", 100, 8)
    command = f"{write_script(shell, 'fsdp.py')} 1 {SMALL} {SHORT_VAL} --text {shell.folder}/text"
    shell.ranks_on(folders, command).succeeds()
    shell.ranks_on(folders, command).fails(
        "ranks start at [('epoch_0001_sample_000000000000', 'seed 0, ", "), (None, 'seed 0, "
    )


def test_snapshot_of_another_layout(shell):
    start(shell, "fsdp.py", "sharded", steps=2).succeeds()
    error = ": move it or set another --snapshot_path"
    start(shell, "pretrain.py", "sharded", steps=2).fails(f"cannot load sharded{error}")
    path = "sharded/epoch_0001_sample_000000000000"
    job = start(shell, "local_sgd.py", "sharded", 2, steps=2)
    job.fails(f"cannot load {path}{error}")
    (shell.folder / "file").write_text("hello")
    start(shell, "dcp.py", "file", 2, steps=2).fails(
        "--snapshot_path file is a file: name a folder"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hsdp.py", "--shard_size 3", "--shard_size 3 does not divide 2 ranks"),
        (
            "tensor_parallel.py",
            "--n_head 3 --n_embd 33 --context 9 --tp_size 3",
            "--tp_size 3 does not divide the 2 ranks",
        ),
        ("pipeline_parallel.py", "--pp_size 3", "--pp_size 3 does not divide the 2 ranks"),
        (
            "context_parallel.py",
            "--n_head 3 --n_embd 33 --context 9 --cp_size 3",
            "--cp_size 3 does not divide the 2 ranks",
        ),
        (
            "three_d.py",
            "--pp_size 2 --tp_size 2",
            "--pp_size times --tp_size does not divide the 2 ranks",
        ),
        ("expert_parallel.py", "--n_experts 3", "--n_experts must be a multiple of the 2 ranks"),
    ],
)
def test_ranks_that_do_not_divide(shell, name, options, message):
    shell.ranks(f"gpt/{name} 1 {options}", 2).fails(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hsdp.py", "set --shard_size, which is [2, 2, 1, 1] by default"),
        ("local_sgd.py", "start as many ranks on each, not [2, 2, 1, 1]"),
    ],
)
def test_nodes_of_unequal_size(shell, name, message):
    """Each rank would take the size of its own node, and wait for other ranks."""
    folders = [shell.folder / name for name in ("a", "a", "b", "c")]
    job = shell.ranks_on(folders, f"gpt/{name} 1")
    job.fails(f"nodes of unequal size: {message}")


def start_local_sgd(shell, epochs, ranks_per_node, setup, options):
    """Starts two steps more than a multiple of three per epoch, on nodes that share snapshots."""
    write_text(shell.folder / "text", STEPS * BATCH_SIZE + VAL_CHUNKS, 8)
    folders = [
        shell.folder / f"node{n}" for n, count in enumerate(ranks_per_node) for _ in range(count)
    ]
    options += f" {SHORT_VAL} --batch_size {BATCH_SIZE // len(folders)} --text {shell.folder}/text"
    options += f" --snapshot_path {shell.folder}/local"
    command = f"{write_script(shell, 'local_sgd.py', setup)} {epochs} 1 {SMALL} {options}"
    return shell.ranks_on(folders, command, OUT=str(shell.folder))


def test_synchronized_every_step_is_ddp(shell):
    """On two nodes of two ranks, with a plain mean and a linear optimizer, it is pretrain.py."""
    options = "--learning_rate 0.3"
    start(shell, "pretrain.py", "ddp.pt", 4, setup=PLAIN_SGD, options=options).succeeds()
    options += " --sync_every 1 --outer_lr 1 --outer_momentum 0"
    start_local_sgd(shell, 1, [2, 2], PLAIN_SGD, options).succeeds()
    expected = load_gpt(shell.folder / "ddp.pt")["model"]
    snapshot = load_gpt(shell.folder / "local")
    for node in ("node_0", "node_1"):
        model = snapshot[node]["model"]
        diff = max_abs_diff([model[name] for name in expected], expected.values())
        print(node, "differs from pretrain.py by", diff)
        assert diff < 2e-6


# Each rank keeps the weights of all nodes before each outer step, its own before and after, and
# what it all-reduces in it: numbers of elements, and of ranks.
RECORD_WEIGHTS = """
def flat(params):
    return torch.cat([param.detach().full_tensor().flatten() for param in params])
outer_step, history = script.Trainer._outer_step, []
all_reduce = script.dist.all_reduce
def record_and_step(self):
    record = [flat(self.outer_params), flat(self.model.parameters())]
    sizes = []
    def all_reduce_and_record(tensor, group):
        sizes.append((tensor.numel(), group.size()))
        all_reduce(tensor, group=group)
    script.dist.all_reduce = all_reduce_and_record
    outer_step(self)
    script.dist.all_reduce = all_reduce
    history.append([*record, flat(self.model.parameters()), sizes])
    torch.save(history, f"{os.environ['OUT']}/history-{os.environ['RANK']}")
script.Trainer._outer_step = record_and_step
"""


def test_outer_step(shell):
    """After every 3 of 20 steps, and the last, Nesterov's momentum moves all ranks to one point.

    Between nodes, each rank sends its own shards only: half of the model, where a node has two, in
    one all-reduce.
    """
    options = "--sync_every 3 --outer_lr 0.5 --outer_momentum 0.8"
    start_local_sgd(shell, 1, [2, 2], RECORD_WEIGHTS, options).succeeds()
    ranks = [load(shell.folder / f"history-{rank}") for rank in range(4)]
    assert [len(history) for history in ranks] == [STEPS // 3 + 1] * 4
    outer = ranks[0][0][0]
    velocity = torch.zeros_like(outer)
    for records in zip(*ranks, strict=True):
        before, weights, after, sizes = zip(*records, strict=True)
        assert max_abs_diff(before, [outer] * 4) < 1e-6
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3])
        assert not torch.equal(weights[0], weights[2])
        change = (weights[0] + weights[2]) / 2 - outer
        velocity = 0.8 * velocity + change
        outer = outer + 0.5 * (change + 0.8 * velocity)
        assert all(torch.equal(after[0], other) for other in after)
        assert max_abs_diff(after[:1], [outer]) < 1e-6
        for rank_sizes in sizes:
            assert rank_sizes == [(len(outer) / 2, 2)]


@pytest.mark.long
def test_local_sgd_on_other_nodes(shell):
    """Each node has a state of its own: it resumes on more ranks per node, not on more nodes."""
    start_local_sgd(shell, 1, [1, 1], "", "").succeeds()
    job = start_local_sgd(shell, 2, [1, 1, 1], "", "")
    job.fails("cannot load ", ": move it or set another --snapshot_path")
    assert "node_2" in job.output
    output = start_local_sgd(shell, 2, [2, 2], "", "").succeeds()
    assert "1 of 2 epochs done" in output


MEASURE = f"""{MEASURE_MEMORY}
script.Trainer._evaluate = lambda self: None
script.GPT.generate = lambda self, prompt, max_new_tokens: ""
"""


@pytest.mark.parametrize(
    ("model", "chunks", "runs"),
    [
        pytest.param(  # weights, gradients and optimizer
            "--n_layer 12 --n_head 8 --n_embd 384 --context 8",
            4,
            [
                ("fsdp.py", 4, "--batch_size 1", 0.4),
                ("pipeline_parallel.py", 4, "--pp_size 4 --micro_batches 4", 0.35),
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(  # activations of the blocks in each stage, of at most four micro-batches
            "--n_layer 4 --n_head 2 --n_embd 128 --context 512 --batch_size 32",
            32,
            [("pipeline_parallel.py", 4, "--pp_size 4 --micro_batches 16", 0.15)],
            marks=NIGHTLY,
        ),
        pytest.param(  # activations of a part of the time
            "--n_layer 3 --n_head 4 --n_embd 128 --context 8192 --batch_size 1",
            1,
            [("context_parallel.py", 4, "--cp_size 4", 0.45)],
            marks=NIGHTLY,
        ),
    ],
    ids=["weights", "activations", "context"],
)
def test_memory_of_a_rank(shell, model, chunks, runs):
    """Beside that of a single process: measured by the system, at their peak."""
    context = int(re.search(r"--context (\d+)", model)[1])
    write_text(shell.folder / "text", 32 + chunks, context)
    peaks = []
    for name, ranks, options, _ in [("pretrain.py", 1, "", 1), *runs]:
        command = f"{write_script(shell, name, MEASURE)} 1 1 --text text --batch_size 4 {model}"
        output = shell.ranks(f"{command} --val_tokens {32 * context} {options}", ranks)
        peaks.append(max(map(int, re.findall(r"rank \d took (\d+)", output.succeeds()))))
    ratios = [peak / peaks[0] for peak in peaks[1:]]
    print(model, peaks[0], ratios)
    assert all(ratio < limit for ratio, (*_, limit) in zip(ratios, runs, strict=True)), ratios


def test_large_text_is_not_loaded(shell):
    """Of 2 GiB, it holds 8 bytes per chunk in memory; the file is sparse, and takes no disk."""
    stop = """
@after(script.Trainer, "_run_batch")
def end(self, inputs, targets):
    if self.samples_run == 4:
        script.dist.destroy_process_group()
        sys.exit()
"""
    peak = {}
    context = 1024
    for gibibytes in (1 / 64, 2):
        with open(shell.folder / "text", "wb") as file:
            file.truncate(int(gibibytes * 2**30))
        command = f"{write_script(shell, 'pretrain.py', MEASURE + stop)} 1 1 --text text"
        model = f"--n_layer 1 --n_head 1 --n_embd 16 --context {context} --batch_size 1"
        job = shell.ranks(f"{command} {model} --num_workers 1")
        assert job.wait() == 0, job.output
        peak[gibibytes] = int(re.search(r"took (\d+)", job.output)[1])
    print(peak)
    permutation_bytes = 8 * 2 * 2**30 // context
    assert peak[2] - peak[1 / 64] < permutation_bytes + 20 * 2**20, peak


LIMIT = f"""{LIMIT_MEMORY}
@before(script.GPT, "__init__")
def limit(*args):
    limit_memory({{growth}})
"""


def test_starts_without_memory_for_the_whole_model(shell):
    """A limit on the memory of each of 4 ranks: half of what the weights need."""
    weights_bytes = 4 * 12 * 12 * 512**2  # of 12 blocks
    setup = LIMIT.format(growth=weights_bytes // 2)
    write_text(shell.folder / "text", VAL_CHUNKS + 1, 8)
    options = f"{SHORT_VAL} --n_layer 12 --n_head 8 --n_embd 512 --context 8 --batch_size 1"
    options += " --text text"
    plain = shell.ranks(f"{write_script(shell, 'pretrain.py', setup)} {options}")
    assert plain.wait() != 0 and "can't allocate memory" in plain.output
    sharded = shell.ranks(f"{write_script(shell, 'fsdp.py', setup)} {options}", 4)
    assert sharded.wait() == 0, sharded.output
    assert sharded.output.count("started") == 4
