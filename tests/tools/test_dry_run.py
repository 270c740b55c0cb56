"""tools/dry_run.py: what it says of rank 0, the mistakes that it finds, what it leaves alone."""

import math
import re
from types import SimpleNamespace

import pytest
from helpers import first, gpt_config

from gpt import llama
from gpt.pretrain import GPT
from tools.dry_run import peak, shape_of
from tools.formulas.memory import memory
from tools.steps import ROOT

FILES = {  # the options of each, and its mesh on n ranks
    "gpt/pretrain.py": ("", ""),
    "gpt/fsdp.py": ("", "dp {n}"),
    "gpt/hsdp.py": ("", "replicate {eighth} x shard 8"),
    "gpt/tensor_parallel.py": ("--tp_size 2", "dp {half} x tp 2"),
    "gpt/context_parallel.py": ("--cp_size 2", "dp {half} x cp 2"),
    "gpt/three_d.py": ("--pp_size 2 --tp_size 2", "pp 2 x dp {quarter} x tp 2"),
}
CASES = [("gpt/fsdp.py", 512), ("gpt/hsdp.py", 8), *((name, 4096) for name in FILES)]
TOO_LARGE = 99999999999999999999


def dry_run(shell, ranks, script, options=""):
    return shell.ranks(f"tools/dry_run.py {ranks} {ROOT / script} {options}", 1)


@pytest.mark.parametrize(("name", "ranks"), first(2, CASES))
def test_many_ranks(shell, name, ranks):
    """The mesh, and how much of each matrix rank 0 holds. Each rank evaluates a chunk at least."""
    options, mesh = FILES[name]
    options += f" --batch_size 8 --val_tokens {128 * ranks}"
    output = dry_run(shell, ranks, name, options).succeeds()
    assert "without a gradient" not in output
    if mesh:
        mesh = mesh.format(n=ranks, half=ranks // 2, quarter=ranks // 4, eighth=ranks // 8)
        assert f"mesh: {mesh}\n" in output.replace(",", "")
    parameters = list(GPT(gpt_config(4, 2, 128, 64)).parameters())
    shards = {"gpt/pretrain.py": 1, "gpt/hsdp.py": 8}.get(name, ranks)
    if name not in ("gpt/tensor_parallel.py", "gpt/three_d.py"):
        held = sum(math.ceil(p.shape[0] / shards) * p[0].numel() for p in parameters)
        total = sum(p.numel() for p in parameters)
        assert f"parameters: {total:,}; rank 0 holds {held:,}, {4 * held:,} bytes" in output


@pytest.mark.parametrize("tied", [False, True])
def test_head_counts_once(tied):
    """Of what the calculator knows, the rest is a block; it computes as the script counts."""
    args = gpt_config(2, 2, 32, 8, n_kv_head=1, n_hidden=64, norm_eps=1e-6, rope_theta=1e4)
    args.tie_word_embeddings = tied
    model = llama.GPT(args, 300)
    shape = shape_of(model, args)
    last_norm = 32
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert shape.block_params * 2 - last_norm == 2 * block
    assert shape.flops_per_token == model.flops_per_token


def test_peak_of_a_pipeline():
    """The samples of the calculator are those of a micro-batch."""
    args = gpt_config(2, 2, 32, 8, batch_size=8, micro_batches=4, pp_size=2, compile=False)
    shape = shape_of(GPT(args), args)
    expected = memory(shape, 2, 2, shards=1, pp=2)["peak"]
    assert peak(SimpleNamespace(args=args, shape=shape), shape.params) == expected


def test_weight_without_a_gradient(shell):
    """FSDP trains without a word, where DDP would stop in the second step."""
    line = "        self.head_size = config.n_embd // config.n_head\n"
    text = (ROOT / "gpt" / "fsdp.py").read_text()
    assert text.count(line) == 1
    unused = "        self.unused = nn.Linear(4, 4)\n"
    script = shell.folder / "my_fsdp.py"
    script.write_text(text.replace(line, line + unused))
    output = dry_run(shell, 8, script, "--n_layer 1").succeeds()
    assert "without a gradient: blocks.0.unused.weight blocks.0.unused.bias\n" in output


MISTAKES = [  # the first is tried at each push
    ("8 nosuch.py", "there is no file .*nosuch.py"),
    (f"8 gpt/fsdp.py --seed {TOO_LARGE}", r".*fsdp.py fails at `torch.manual_seed\(.*Overflow"),
    (f"8 gpt/slow_network.py --bucket_cap_mb {TOO_LARGE}", ".* at `self.model = .*TypeError"),
    (f"8 multinode.py --batch_size {TOO_LARGE}", ".* at `for .*ValueError: Stop argument"),
    ("512 gpt/hsdp.py --shard_size 3", "--shard_size 3 does not divide 512"),
    ("4096 multinode.py", "4,096 replicas have less than a sample"),
    ("8 gpt/pretrain.py --n_layer 32 --n_head 32 --n_embd 4096", "too little memory"),
]


@pytest.mark.parametrize(("command", "message"), first(1, MISTAKES))
def test_wrong_arguments(shell, command, message):
    """One line, and no traceback, of what torchrun would show with one, or of wrong sizes."""
    job = dry_run(shell, *command.split(maxsplit=2))
    assert job.wait() == 1
    assert "Traceback" not in job.output
    assert re.match(message, job.output.splitlines()[-1]), job.output


@pytest.mark.nightly
def test_snapshots_are_left_alone(shell):
    """Neither read, which would fail, nor written."""
    (shell.folder / "snapshot.pt").write_text("no snapshot")
    assert "parameters: " in dry_run(shell, 8, "elastic_ddp.py").succeeds()
    assert (shell.folder / "snapshot.pt").read_text() == "no snapshot"
