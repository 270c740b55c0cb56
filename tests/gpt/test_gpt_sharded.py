"""The files of gpt/ that shard: the same weights as pretrain.py's on one rank, in less memory."""

import difflib
import math
import re
import shutil
import signal

import pytest
import torch
from gpt_helpers import (
    BATCH_SIZE,
    FLOAT64,
    OF_REFERENCE,
    SHAPES,
    STEPS,
    assert_split_is_one_rank,
    reference,
    start,
    weights_diff,
    write_script,
    write_tokens,
)
from helpers import (
    AOT_EAGER,
    CLOCK,
    LIMIT_MEMORY,
    MEASURE_MEMORY,
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    VAL_CHUNKS,
    at_step,
    equal_snapshots,
    fences,
    first,
    long,
)

from gpt import fsdp
from tools.compose.compose import compose
from tools.launch.snapshots import load, load_gpt, max_abs_diff, write_text
from tools.steps import ROOT

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
    "expert_parallel.py": [
        (2, "--ep_size 1"),
        (4, "--ep_size 2 --recompute --eval_every_steps 3"),
        (4, ""),
    ],
    "llama.py": [(2, "")],
    "documents.py": [(4, "--recompute"), (2, "")],
    "chunked_loss.py": [(4, "--recompute"), (2, "--loss_chunks 2")],
    "llama_tensor_parallel.py": [(2, "--tp_size 2"), (4, "--tp_size 2 --recompute")],
    "muon.py": [(2, "--recompute"), (4, ""), (3, "")],
}


QUICK = ["hsdp.py"]
LONGER = ["tensor_parallel.py", "pipeline_parallel.py", "expert_parallel.py", "llama.py"]
OTHERS = [name for name in LAYOUTS if name not in QUICK + LONGER]


@pytest.mark.parametrize("name", [*QUICK, *long(*LONGER), *first(0, OTHERS)])
def test_split_is_one_rank(shell, name):
    assert_split_is_one_rank(shell, name, LAYOUTS[name])


# Compiles without generating code; counts what it is given, and why Dynamo cuts.
COUNT_GRAPHS = """
from torch._dynamo.utils import counters
graphs = []
def count(graph, inputs):
    graphs.append(any(isinstance(size, torch.SymInt) for size in inputs))
    return graph
torch.compile = functools.partial(torch.compile, backend=count)
@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    breaks = dict(counters["graph_break"])
    print(f"{len(graphs)} graphs, {sum(graphs)} of any size, breaks: {breaks}", end=" ")
    print(torch.get_float32_matmul_precision())
"""


COMPILED = ["pretrain.py", "tensor_parallel.py", "context_parallel.py", "llama_tensor_parallel.py"]
COMPILED += ["moe.py", "expert_parallel.py"]


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, ["fsdp.py", *COMPILED]))
def test_compiled(shell, name):
    """Two graphs for each size: of the blocks, which exceed DDP's buckets, and the loss."""
    options = f"{SHAPES.get(name, '')} --compile --n_layer 4 --n_embd 256 --eval_every_steps 1000"
    ranks, option = LAYOUTS.get(name, [(2, "")])[-1]
    job = start(shell, name, "compiled", ranks, COUNT_GRAPHS, f"{options} {option}", steps=1.5)
    with_experts = name in ("moe.py", "expert_parallel.py")  # which, and the router, cut a block
    breaks, graphs = (".*", 6) if with_experts else ("{}", 2)
    found = re.findall(rf"(\d+) graphs, 0 of any size, breaks: {breaks} high\n", job.succeeds())
    assert sorted(map(int, found)) == [graphs] * ranks + [2 * graphs] * ranks


@pytest.mark.parametrize("name", first(0, ["moe.py", "documents.py", "muon.py", "three_d.py"]))
def test_compiled_is_equal(shell, name):
    """Traced forward and backward, and with recomputation where the layout has it."""
    ranks, options = LAYOUTS[name][0]
    assert_split_is_one_rank(shell, name, [(ranks, f"{options} --compile")], AOT_EAGER)


# Ranks, file and options; each resumes what the one before has saved.
RESUMED = {
    "sharded": [  # and by DDP
        "2 dcp.py",
        "3 fsdp.py --recompute",
        "4 tensor_parallel.py --tp_size 2",
        "1 dcp.py",
    ],
    "pipeline": [
        "2 pipeline_parallel.py --pp_size 2 --micro_batches 2",
        "4 hsdp.py --shard_size 2",
        "4 pipeline_parallel.py --pp_size 4 --micro_batches 4",
        "1 pipeline_parallel.py --micro_batches 1",
    ],
    "context": [
        "2 context_parallel.py --cp_size 2",
        "1 fsdp.py",
        "4 context_parallel.py --cp_size 2",
        "2 context_parallel.py",
    ],
    "three_d": [
        "8 three_d.py --pp_size 2 --tp_size 2 --micro_batches 3",
        "2 fsdp.py",
        "4 three_d.py --pp_size 2 --tp_size 2 --micro_batches 3",
        "2 fsdp.py",
    ],
    "experts": [
        "2 expert_parallel.py",
        "3 moe.py --recompute",
        "4 expert_parallel.py --ep_size 2",
        "2 moe.py",
    ],
    "llama": ["2 llama.py", "1 chunked_loss.py", "3 llama.py --recompute", "2 chunked_loss.py"],
    "llama_tensor_parallel": [
        "2 llama_tensor_parallel.py --tp_size 2",
        "1 llama.py",
        "4 llama_tensor_parallel.py --tp_size 2 --recompute",
        "2 llama_tensor_parallel.py",
    ],
    "documents": ["2 documents.py", "1 documents.py", "3 documents.py", "2 documents.py"],
    "muon": ["2 muon.py", "3 muon.py --recompute", "1 muon.py", "4 muon.py"],
}


@pytest.mark.parametrize(
    "runs",
    [RESUMED["sharded"], *long(RESUMED["pipeline"]), *first(2, [*RESUMED.values()])[2:]],
    ids=RESUMED,
)
def test_stopped_and_resumed_on_other_ranks(shell, runs):
    """Three are stopped by a signal in mid-epoch; the last trains the end."""
    kind = runs[0].split()[1]
    shape = SHAPES.get(kind, "")
    if kind == "llama.py":
        shape += " --tie_word_embeddings"  # one matrix, saved by two names
    twin = FLOAT64 + OF_REFERENCE.get(kind, "")
    start(shell, reference(kind), "one", 1, twin, shape, 2 * STEPS).succeeds()
    stops = [(3, 10), (18, 20), (21, 30), (0, 0)]  # step of the signal, and of the stop
    for run, (signal_step, stop_step) in zip(runs, stops, strict=True):
        ranks, name, *options = run.split()
        setup = FLOAT64 + SIGNAL * (stop_step > 0)
        stop = {"SIGNAL": "15", "SIGNAL_AT": f"0 {signal_step * BATCH_SIZE}"}
        options = " ".join([*options, shape])
        job = start(shell, name, "several", int(ranks), setup, options, 2 * STEPS, **stop)
        if stop_step > 0:
            job.fails("stopped by a signal")
            assert f"epoch 0 + {stop_step * BATCH_SIZE} samples | " in job.output
    job.succeeds()
    diff = weights_diff(shell, "several", "one")
    print("stopped and resumed differs by", diff)
    assert diff < 1e-12


@pytest.mark.long
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
    start(shell, "pretrain.py", "one", setup=FLOAT64, options=options).succeeds()
    options += " --pp_size 4 --micro_batches 6"
    start(shell, "pipeline_parallel.py", "several", 4, setup, options).succeeds()
    assert weights_diff(shell, "several", "one") < 1e-12


@pytest.mark.long
def test_loss_parallelism(shell):
    """With the lines of the page in place of those that are most like them."""
    lines = (ROOT / "gpt" / "tensor_parallel.py").read_text().splitlines()
    (shown,) = fences("gpt/tensor_parallel.md", "python")
    for change in re.split(r"\n?# in .*\n", shown.rstrip())[1:]:
        (old,) = difflib.get_close_matches(change.splitlines()[-1], lines, 1)
        lines[lines.index(old)] = change
    (shell.folder / "changed").write_text("\n".join(lines))
    changed = f"exec(open('changed').read(), script.__dict__)\n{SHORT_GPT}"
    assert_split_is_one_rank(shell, "tensor_parallel.py", [(4, "--tp_size 2")], changed)


COUNT_ALL_REDUCES = """
reduced = []
@before(script.dist, "all_reduce")
def count(tensor, *arguments, **options):
    if tensor.numel() > 100:
        reduced.append(tensor)
@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    print("summed over the nodes:", len(reduced))
"""


@pytest.mark.long
def test_micro_batches_in_hybrid_shards(shell):
    """With the line of the page, as many all-reduces of gradients as without micro-batches."""
    lines = [line for line, _ in compose(["gpt/accumulate.py", "gpt/hsdp.py"], "own.py")]
    place = lines.index("            micro_inputs = inputs[start:end]")
    lines[place:place] = fences("gpt/hsdp.md", "python")
    (shell.folder / "own").write_text("\n".join(lines))
    own = f"exec(open('own').read(), script.__dict__)\n{SHORT_GPT}{FLOAT64}{COUNT_ALL_REDUCES}"
    start(shell, "pretrain.py", "one", setup=FLOAT64).succeeds()
    found = []
    for size in (1, 3):
        options = f"--shard_size 2 --micro_batch_size {size}"
        output = start(shell, "hsdp.py", f"s{size}", 4, own, options).succeeds()
        found.append(re.findall(r"summed over the nodes: (\d+)", output)[-1])
        assert weights_diff(shell, f"s{size}", "one") < 1e-12
    assert found[0] == found[1] != "0"


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("fsdp.py", 2, ""),
        ("accumulate.py", 2, "--micro_batch_size 2"),
        ("pipeline_parallel.py", 4, "--pp_size 2 --micro_batches 3"),
    ],
)
def test_val_loss(shell, name, ranks, options):
    """Of batches that cannot be shared evenly, after a step: it is the one of a single rank."""
    setup = "torch.set_default_dtype(torch.float64)\ntorch.Tensor.float = torch.Tensor.double"
    setup += '\n@before(script.GPT, "forward")\ndef note(self, x): print("takes", len(x))'
    more = f"--n_layer 2 --eval_every_steps 1 --val_tokens {8 * 14}"  # in batches of 6
    alone = start(shell, "fsdp.py", "one", 1, setup, more, steps=2)
    several = start(shell, name, "several", ranks, setup, f"{more} {options}", steps=2)
    losses = [re.search(r"val loss (\S+)", job.succeeds())[1] for job in (alone, several)]
    assert losses[0] == losses[1]
    if name == "accumulate.py":  # in training and evaluation
        assert set(re.findall(r"takes (\d+)", several.output)) == {"1", "2"}


def test_loss_of_bfloat16():
    """The logits that FSDP's policy makes on GPUs: it is computed in float32."""
    logits = torch.zeros(1, 8, 256).bfloat16()
    loss = fsdp.next_byte_loss(logits, torch.arange(8)[None])
    assert loss.item() == pytest.approx(math.log(256))


@pytest.mark.long
def test_kept_snapshots(shell):
    """One of them, with those after it deleted, leads to the same end; a user's copy stays.

    Those after a kill are kept at the same steps; with larger batches, the old ones stay.
    """
    options = "--keep_every_steps 10 --save_every_steps"
    kill = {"SIGNAL": "9", "SIGNAL_AT": f"0 {16 * BATCH_SIZE}"}
    ends = []
    for _ in range(2):
        start(shell, "async_save.py", "s", 2, options=f"{options} 5").succeeds()
        first, second, last, *copies = sorted((shell.folder / "s").iterdir())
        assert [path.name[-3:] for path in (first, second, last)] == ["120", "240", "000"]
        ends.append(load_gpt(shell.folder / "s"))
        shutil.copytree(first, shell.folder / "s" / "epoch_best", dirs_exist_ok=True)
        shutil.rmtree(second)
        shutil.rmtree(last)
        job = start(shell, "async_save.py", "s", 2, SIGNAL, f"{options} 3", **kill)
        assert job.wait() == -signal.SIGKILL
    assert copies and equal_snapshots(*ends)
    larger = f"sys.argv += ['--batch_size', '{BATCH_SIZE}']"  # on each of the two ranks
    start(shell, "async_save.py", "s", 2, larger, f"{options} 5", epochs=2).succeeds()
    assert first.exists() and copies[0].exists()


# The data of the first snapshot is written half a second after it is time for the next one.
WRITE_LATE = """
import threading
from torch.distributed.checkpoint import FileSystemWriter
steps, to_write = [], []
@before(FileSystemWriter, "write_data")
def write_late(self, plan, planner):
    to_write.append(self.path.name)
    while len(steps) < 20 and threading.current_thread() is not threading.main_thread():
        time.sleep(0.01)
    time.sleep(0.5)
    print("writing", to_write.pop())
@before(script.dcp, "async_save")
def assert_written(*arguments, **options):
    assert not to_write
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
    before = job.output.partition("writing epoch_0000_sample_000000000120")[0]
    assert f"trained {20 * BATCH_SIZE}" in before
    start(shell, "fsdp.py", "fsdp", 2, SIGNAL, options, steps=30, **stop).wait()
    for step in (20, 10):
        one, other = (load_gpt(shell.folder / path) for path in ("s", "fsdp"))
        assert one["samples_run"] == step * BATCH_SIZE
        assert equal_snapshots(one, other)
        for path in ("s", "fsdp"):
            shutil.rmtree(shell.folder / path / f"epoch_0000_sample_{step * BATCH_SIZE:012}")


@pytest.mark.parametrize("name", ["async_save.py", *long("fsdp.py")])
def test_full_disk(shell, name):
    job = start(shell, name, "s", 2, steps=2, full_disk_folders=[shell.folder])
    error = "used by another run? CheckpointException('write', {0: (RuntimeError("
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ", error)
    assert "Traceback" not in job.output


@pytest.mark.long
def test_full_disk_where_a_snapshot_is_marked(shell):
    setup = "def touch(path):\n    raise OSError(28, 'No space left')\nscript.Path.touch = touch\n"
    options, full = "--keep_every_steps 1", {"full_disk_folders": [shell.folder]}
    job = start(shell, "async_save.py", "s", 2, setup, options, steps=2, **full)
    job.fails("cannot save s/epoch_0001_sample_000000000000: disk full, ")
    assert "Traceback" not in job.output


def test_killed_while_it_saves(shell):
    """The snapshot before stays, and none but it; if it is damaged, one line says so."""
    kill = at_step(15, "script.dcp.save = lambda *state, **options: os.kill(os.getpid(), 9)")
    options = "--save_every_steps 5 --log_every_steps 5"
    job = start(shell, "dcp.py", "s", 1, CLOCK + kill, options)
    assert job.wait() == -signal.SIGKILL
    (folder,) = (shell.folder / "s").iterdir()
    assert folder.name == "epoch_0000_sample_000000000120"
    # The time is that of five steps alone.
    speeds = [5 * BATCH_SIZE * 8 / seconds for seconds in (0.015, 0.040, 0.065)]
    assert re.findall(r"(\S+) tokens/s", job.output) == [f"{speed:,.0f}" for speed in speeds]
    (folder / "__0_0.distcp").write_bytes(b"cut short")
    start(shell, "dcp.py", "s").fails(f"cannot load s/{folder.name}: move it or set another")


@pytest.mark.parametrize("name", ["dcp.py", "fsdp.py"])
def test_snapshots_need_a_shared_disk(shell, name):
    """Each rank writes its own shards, but only the folder of rank 0 has .metadata."""
    start(shell, name, "s", "ab", steps=2).succeeds()
    start(shell, name, "s", "ab", steps=2).fails(
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


BY_THREE = "--n_head 3 --n_embd 33 --context 9"
OF_LLAMA = "--tp_size 2 --n_kv_head 2 --data ../tokens --val_tokens 64"


@pytest.mark.parametrize(
    ("nodes", "command", "message"),
    [
        ("a", "gpt.py --context 99999999", "has less than one chunk of 99999999 bytes: add text"),
        (
            "a",
            "schedule.py --val_tokens 99999999",
            "for validation: add text, or change --val_tokens",
        ),
        ("aa", "schedule.py --text ../text --val_tokens 64", "and 1 for validation: add text"),
        ("aa", "hsdp.py --shard_size 3", "--shard_size 3 does not divide 2 ranks"),
        ("aabc", "hsdp.py", "unequal size: set --shard_size, which is [2, 2, 1, 1] by default"),
        ("aabc", "local_sgd.py", "unequal size: start as many ranks on each, not [2, 2, 1, 1]"),
        ("aa", f"tensor_parallel.py --tp_size 3 {BY_THREE}", "3 does not divide the 2 ranks"),
        ("aa", f"context_parallel.py --cp_size 3 {BY_THREE}", "3 does not divide the 2 ranks"),
        ("aa", "pipeline_parallel.py --pp_size 3", "--pp_size 3 does not divide the 2 ranks"),
        ("aa", "three_d.py --pp_size 2 --tp_size 2", "--tp_size does not divide the 2 ranks"),
        ("a", "pipeline_parallel.py --batch_size 80000000", "less than one batch to train on"),
        ("aa", "expert_parallel.py --n_experts 3", "divide --n_experts and the 2 ranks"),
        ("aaa", "expert_parallel.py --ep_size 1", "3 shards of each expert must divide --n_embd"),
        ("aaa", f"llama_tensor_parallel.py {OF_LLAMA}", "--tp_size 2 does not divide the 3 ranks"),
    ],
)
def test_refused_by_main(shell, nodes, command, message):
    """What the arguments alone do not tell: too little text, or ranks and nodes that do not fit."""
    write_text(shell.folder / "text", 9, 64)
    write_tokens(shell.folder / "tokens", 9, 64)
    shell.ranks_on([shell.folder / node for node in nodes], f"gpt/{command}").fails(message)


def start_local_sgd(shell, nodes, setup="", options="", **more):
    """Starts 20 steps on nodes that share snapshots."""
    snapshot = f"{shell.folder}/local"
    return start(shell, "local_sgd.py", snapshot, nodes, setup, options, **more)


def test_synchronized_every_step_is_ddp(shell):
    """On two nodes of two ranks, with a plain mean and a linear optimizer, it is pretrain.py."""
    options = "--learning_rate 0.3"
    start(shell, "pretrain.py", "ddp", 4, PLAIN_SGD, options).succeeds()
    options += " --sync_every 1 --outer_lr 1 --outer_momentum 0"
    start_local_sgd(shell, "aabb", PLAIN_SGD, options).succeeds()
    expected = load_gpt(shell.folder / "ddp")["model"]
    snapshot = load_gpt(shell.folder / "local")
    for node in ("node_0", "node_1"):
        model = snapshot[node]["model"]
        diff = max_abs_diff([model[name] for name in expected], expected.values())
        print(node, "differs from pretrain.py by", diff)
        assert diff < 2e-6


# Each rank keeps the weights of all nodes before each outer step, its own before and after, and
# what it all-reduces in it: numbers of elements, and of ranks.
RECORD_WEIGHTS = """
history, sizes = [], []
def flat(params):
    return torch.cat([param.detach().full_tensor().flatten() for param in params])
@before(script.Trainer, "_outer_step")
def record_before(self):
    history.append([flat(self.outer_params), flat(self.model.parameters())])
    sizes.clear()
@before(script.dist, "all_reduce")
def record_size(tensor, *args, group=None):
    if group is not None:
        sizes.append((tensor.numel(), group.size()))
@after(script.Trainer, "_outer_step")
def record_after(self):
    history[-1] += [[*sizes], flat(self.model.parameters())]
    torch.save(history, f"{os.environ['OUT']}/history-{os.environ['RANK']}")
"""


def test_outer_step(shell):
    """After every 3 of 20 steps, and the last, Nesterov's momentum moves all ranks to one point.

    Between nodes, each rank sends its own shards only: half of the model, where a node has two, in
    one all-reduce.
    """
    options = "--sync_every 3 --outer_lr 0.5 --outer_momentum 0.8"
    start_local_sgd(shell, "aabb", RECORD_WEIGHTS, options, OUT=str(shell.folder)).succeeds()
    ranks = [load(shell.folder / f"history-{rank}") for rank in range(4)]
    assert [len(history) for history in ranks] == [STEPS // 3 + 1] * 4
    outer = ranks[0][0][0]
    velocity = torch.zeros_like(outer)
    for records in zip(*ranks, strict=True):
        before, weights, sizes, after = zip(*records, strict=True)
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
    """Each node has a state of its own: it resumes on more ranks per node, not on more nodes.

    All have ended with the same weights, also where an evaluation came before the last outer step.
    """
    start_local_sgd(shell, "ab", options="--sync_every 3 --eval_every_steps 19").succeeds()
    ends = [load_gpt(shell.folder / "local")[node]["model"] for node in ("node_0", "node_1")]
    assert equal_snapshots(*ends)
    job = start_local_sgd(shell, "abc", epochs=2)
    job.fails("cannot load ", ": move it or set another --snapshot_path")
    assert "node_2" in job.output
    output = start_local_sgd(shell, "aabb", epochs=2).succeeds()
    assert "1 of 2 epochs done" in output


PRINT_TOKENS_AND_TEXT = """
@after(script.Trainer, "train")
def print_tokens(self):
    print("tokens:", self.tokens)
def print_text(self, *arguments):
    print("text:", generate(self, *arguments).encode())
    return ""
script.GPT.generate = print_text
"""
GREEDY = "torch.Tensor.multinomial = lambda self, count: self.argmax()[None]\n"


SHARED = [
    ("tensor_parallel.py", 4, "--tp_size 2 --generate 12"),
    ("context_parallel.py", 2, "--cp_size 2 --generate 12"),
    ("chunked_loss.py", 2, "--generate 12"),
    # With a chunk more to train on than a batch.
    ("pipeline_parallel.py", 2, "--pp_size 2 --n_layer 2 --micro_batches 3 --val_tokens 88"),
    ("three_d.py", 4, "--tp_size 2 --micro_batches 3"),
    ("llama_tensor_parallel.py", 4, "--tp_size 2 --n_kv_head 2 --generate 12"),
]


@pytest.mark.parametrize(("name", "ranks", "options"), SHARED)
def test_shared_samples(shell, name, ranks, options):
    """Their ranks count each token once, and generate one text; torch advises nothing else."""
    twin = {"context_parallel.py": "fsdp.py", "chunked_loss.py": "llama.py"}.get(name)
    setup = PRINT_TOKENS_AND_TEXT + GREEDY * bool(twin)
    output = start(shell, name, "s", ranks, setup, options, steps=1).succeeds()
    assert "all_reduce" not in output
    tokens = re.findall(r"tokens: (\S+)", output)
    assert sum(map(float, tokens)) == BATCH_SIZE * 8
    if twin:
        output += start(shell, twin, "one", 1, setup, "--generate 12", steps=1).succeeds()
    texts = re.findall("text: (.+)", output)
    assert len({*texts}) == ("--generate" in options)


PRINT_HELD = """
@before(script.Block, "forward")
def note_time(self, x):
    script.time_of_block = x.shape[1]
@after(script.Trainer, "_run_batch")
def print_held(self, inputs, targets):
    block = next(self.model.blocks.children())
    weights = [block.qkv.weight, block.proj.weight]
    weights += [block.moe.experts.up] if hasattr(block, "moe") else []
    for weight in weights:
        state = self.optimizer.state[weight]["exp_avg"]
        assert state.placements == weight.grad.placements == weight.placements
    shapes = ["x".join(map(str, weight.to_local().shape)) for weight in weights]
    blocks = len([*self.model.blocks.children()])
    print(f"holds {blocks} x", *shapes, "on", script.time_of_block)
"""


HELD = [
    ("fsdp.py", 4, "", "4 x 24x32 8x32 on 8"),
    ("hsdp.py", 4, "--shard_size 2", "4 x 48x32 16x32 on 8"),
    ("tensor_parallel.py", 4, "--tp_size 4", "4 x 24x32 32x8 on 2"),
    ("pipeline_parallel.py", 4, "--pp_size 4 --micro_batches 4", "1 x 96x32 32x32 on 8"),
    ("context_parallel.py", 4, "--cp_size 2", "4 x 24x32 8x32 on 4"),
    ("three_d.py", 8, "--pp_size 2 --tp_size 2 --micro_batches 3", "2 x 24x32 16x16 on 4"),
    ("moe.py", 4, "--n_experts 8", "4 x 24x32 8x32 2x32x128 on 8"),
    ("expert_parallel.py", 4, "--n_experts 8", "4 x 24x32 8x32 2x32x128 on 8"),
    ("expert_parallel.py", 4, "--n_experts 8 --ep_size 2", "4 x 24x32 8x32 4x16x128 on 8"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks", "options", "held"), first(4, HELD))
def test_what_a_rank_holds(shell, name, ranks, options, held):
    """As docs/gpt/compare.md draws: its blocks, its part of qkv, proj and the experts; the time."""
    options += " --n_layer 4"
    output = start(shell, name, "held", ranks, PRINT_HELD, options, steps=1).succeeds()
    assert re.findall("holds (.+)", output) == [held] * ranks


MEASURE = f"""{MEASURE_MEMORY}
script.Trainer._evaluate = lambda self: None
script.GPT.generate = lambda self, prompt, max_new_tokens: ""
"""


STAGES = "pipeline_parallel.py --pp_size 4 --micro_batches"


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "model", "context", "batch_size", "limit"),
    [
        # Weights, gradients and optimizer.
        (f"{STAGES} 4", "--n_layer 12 --n_head 8 --n_embd 384", 8, 4, 0.35),
        # Activations of the blocks in each stage, of at most four micro-batches.
        (f"{STAGES} 16", "--n_layer 4 --n_head 2 --n_embd 128", 512, 32, 0.15),
        # Activations of a part of the time.
        ("context_parallel.py --cp_size 4", "--n_layer 3 --n_head 4 --n_embd 128", 8192, 1, 0.45),
    ],
    ids=["weights", "activations", "context"],
)
def test_memory_of_a_rank(shell, options, model, context, batch_size, limit):
    """One of four, beside that of a single process: measured by the system, at their peak."""
    write_text(shell.folder / "text", 32 + batch_size, context)
    model += f" --context {context} --val_tokens {32 * context} --batch_size {batch_size}"
    peaks = []
    for ranks, script in [(1, "pretrain.py"), (4, options)]:
        name, *more = script.split()
        command = f"{write_script(shell, name, MEASURE)} 1 1 --text text {model} {' '.join(more)}"
        output = shell.ranks(command, ranks).succeeds()
        peaks.append(max(map(int, re.findall(r"rank \d took (\d+)", output))))
    print(peaks)
    assert peaks[1] < limit * peaks[0]


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
