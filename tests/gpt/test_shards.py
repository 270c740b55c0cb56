"""Each file of gpt/ that shards, in a table: the weights of one rank, in less memory.

Then what fsdp.py, hsdp.py, tensor_parallel.py and pipeline_parallel.py alone claim. What another of
them alone claims is tested in a file of its name.
"""

import math
import re

import pytest
import torch
from gpt_helpers import (
    BATCH_SIZE,
    FLOAT64,
    OF_REFERENCE,
    SHAPES,
    SIGNAL_AT_FOURTH,
    STEPS,
    assert_split_is_one_rank,
    reference,
    signal_after,
    start,
    write_script,
    write_tokens,
)
from helpers import (
    AOT_EAGER,
    LIMIT_MEMORY,
    MEASURE_MEMORY,
    SHORT_GPT,
    SHORT_VAL,
    VAL_CHUNKS,
    fences,
    first,
    long,
    read_script,
    weights_diff,
)

from gpt import fsdp
from tools.compose.compose import compose
from tools.launch.snapshots import write_text

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


COMPILED = ["pretrain.py", "tensor_parallel.py", "context_parallel.py", "llama_tensor_parallel.py"]
COMPILED += ["moe.py", "expert_parallel.py"]


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, ["fsdp.py", *COMPILED]))
def test_compiled(shell, name):
    """Two graphs for each size: of the blocks, which exceed DDP's buckets, and the loss."""
    options = f"{SHAPES.get(name, '')} --compile --n_layer 4 --n_embd 256 --eval_every_steps 1000"
    ranks, option = LAYOUTS.get(name, [(2, "")])[-1]
    setup = read_script("count_graphs.py")
    job = start(shell, name, "compiled", ranks, setup, f"{options} {option}", steps=1.5)
    with_experts = name in ("moe.py", "expert_parallel.py")  # which, and the router, cut a block
    breaks, graphs = (".*", 6) if with_experts else ("{}", 2)
    precision = "highest" if with_experts else "high"  # of float32, as their router is
    pattern = rf"(\d+) graphs, 0 of any size, breaks: {breaks} {precision}\n"
    found = re.findall(pattern, job.succeeds())
    assert sorted(map(int, found)) == [graphs] * ranks + [2 * graphs] * ranks


@pytest.mark.parametrize("name", first(0, ["moe.py", "documents.py", "muon.py", "three_d.py"]))
def test_compiled_is_equal(shell, name):
    """Traced forward and backward, and with recomputation where the layout has it."""
    ranks, options = LAYOUTS[name][0]
    assert_split_is_one_rank(shell, name, [(ranks, f"{options} --compile")], AOT_EAGER)


# Ranks, file and options; each resumes what the one before has saved.
RESUMED = [
    "2 dcp.py, 3 fsdp.py --recompute, 4 tensor_parallel.py --tp_size 2, 1 dcp.py",  # and by DDP
    "2 pipeline_parallel.py --pp_size 2 --micro_batches 2, 4 hsdp.py --shard_size 2, "
    "4 pipeline_parallel.py --pp_size 4 --micro_batches 4, "
    "1 pipeline_parallel.py --micro_batches 1",
    "2 context_parallel.py --cp_size 2, 1 fsdp.py, 4 context_parallel.py --cp_size 2, "
    "2 context_parallel.py",
    "8 three_d.py --pp_size 2 --tp_size 2 --micro_batches 3, 2 fsdp.py, "
    "4 three_d.py --pp_size 2 --tp_size 2 --micro_batches 3, 2 fsdp.py",
    "2 expert_parallel.py, 3 moe.py --recompute, 4 expert_parallel.py --ep_size 2, 2 moe.py",
    "2 llama.py, 1 chunked_loss.py, 3 llama.py --recompute, 2 chunked_loss.py",
    "2 llama_tensor_parallel.py --tp_size 2, 1 llama.py, "
    "4 llama_tensor_parallel.py --tp_size 2 --recompute, 2 llama_tensor_parallel.py",
    "2 documents.py, 1 documents.py, 3 documents.py, 2 documents.py",
    "2 muon.py, 3 muon.py --recompute, 1 muon.py, 4 muon.py",
]


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    first(2, RESUMED),
    ids=lambda runs: " ".join(dict.fromkeys(re.findall(r"\w+\.py", runs))),
)
def test_stopped_and_resumed_on_other_ranks(shell, runs):
    """Three are stopped by a signal in mid-epoch; the last trains the end."""
    runs = runs.split(", ")
    kind = runs[0].split()[1]
    shape = SHAPES.get(kind, "")
    if kind == "llama.py":
        shape += " --tie_word_embeddings"  # one matrix, saved by two names
    twin = FLOAT64 + OF_REFERENCE.get(kind, "")
    start(shell, reference(kind), "one", 1, twin, shape, 2 * STEPS).succeeds()
    stops = [(1, 4), (6, 8), (9, 12), (0, 0)]  # step of the signal, and of the stop
    for run, (signal_step, stop_step) in zip(runs, stops, strict=True):
        ranks, name, *options = run.split()
        setup = FLOAT64 + SIGNAL_AT_FOURTH * (stop_step > 0)
        stop = signal_after(signal_step)
        options = " ".join([*options, shape])
        job = start(shell, name, "several", int(ranks), setup, options, 2 * STEPS, **stop)
        if stop_step > 0:
            job.fails("stopped by a signal")
            assert f"epoch 0 + {stop_step * BATCH_SIZE} samples | " in job.output
    job.succeeds()
    diff = weights_diff(shell, "several", "one")
    print("stopped and resumed differs by", diff)
    assert diff < 1e-12


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
    setup = f'{FLOAT64}\n@before(script.GPT, "forward")\ndef note(self, x): print("takes", len(x))'
    more = f"--n_layer 2 --eval_every_steps 1 --val_tokens {8 * 14}"  # in batches of 6
    alone = start(shell, "fsdp.py", "one", 1, setup, more, steps=2)
    several = start(shell, name, "several", ranks, setup, f"{more} {options}", steps=2)
    losses = [re.search(r"val loss (\S+)", job.succeeds())[1] for job in (alone, several)]
    assert losses[0] == losses[1]
    if name == "accumulate.py":  # in training and evaluation
        assert set(re.findall(r"takes (\d+)", several.output)) == {"1", "2"}


BY_THREE = "--n_head 3 --n_embd 33 --context 9"
OF_LLAMA = "--tp_size 2 --n_kv_head 2 --data ../tokens --val_tokens 64"


@pytest.mark.parametrize(
    ("nodes", "command", "message"),
    [
        ("a", "gpt.py --context 99999999", "has less than one chunk of 99999999 bytes: add text"),
        (
            "a",
            "evaluate.py --val_tokens 99999999",
            "for validation: add text, or change --val_tokens",
        ),
        ("aa", "evaluate.py --text ../text --val_tokens 64", "and 1 for validation: add text"),
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


# It generates all that it is told to, for which `SHORT_GPT` has kept the model's own `generate`.
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
    """As docs/choose.md draws: its blocks, its part of qkv, proj and the experts; the time."""
    options += " --n_layer 4"
    setup = read_script("print_held.py")
    output = start(shell, name, "held", ranks, setup, options, steps=1).succeeds()
    assert re.findall("holds (.+)", output) == [held] * ranks


MEASURE = f"""{MEASURE_MEMORY}
script.Trainer._evaluate = lambda self: None
script.GPT.generate = lambda self, prompt, max_new_tokens: ""
"""
STAGES = "pipeline_parallel.py --pp_size 4 --micro_batches"


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


def test_loss_of_bfloat16():
    """The logits that the policy of fsdp.py makes on GPUs: it is computed in float32."""
    logits = torch.zeros(1, 8, 256).bfloat16()
    loss = fsdp.next_byte_loss(logits, torch.arange(8)[None])
    assert loss.item() == pytest.approx(math.log(256))


LIMIT = f"""{LIMIT_MEMORY}
@before(script.GPT, "__init__")
def limit(*args):
    limit_memory({{growth}})
"""


@pytest.mark.long
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


@pytest.mark.long
def test_micro_batches_in_hybrid_shards(shell):
    """With the line of the page, as many all-reduces of gradients as without micro-batches."""
    lines = [line for line, _ in compose(["gpt/accumulate.py", "gpt/hsdp.py"], "own.py")]
    place = lines.index("            micro_inputs = inputs[start:end]")
    lines[place:place] = fences("gpt/hsdp.md", "python")
    (shell.folder / "own.py").write_text("\n".join(lines))
    own = f"exec(open('own.py').read(), script.__dict__)\n{SHORT_GPT}{FLOAT64}"
    own += read_script("count_node_sums.py")
    start(shell, "pretrain.py", "one", setup=FLOAT64).succeeds()
    found = []
    for size in (1, 3):
        options = f"--shard_size 2 --micro_batch_size {size}"
        output = start(shell, "hsdp.py", f"s{size}", 4, own, options).succeeds()
        found.append(re.findall(r"summed over the nodes: (\d+)", output)[-1])
        assert weights_diff(shell, f"s{size}", "one") < 1e-12
    assert found[0] == found[1] != "0"


@pytest.mark.long
def test_schedule_by_hand(shell):
    """The one on the page of pipeline_parallel.py, in place of the library's."""
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
