"""tools/dry_run.py: what it says of rank 0, the mistakes that it finds, what it leaves alone."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
from helpers import first, gpt_config, run
from rankcheck.launch.jobs import free_port

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
CASES = [(name, ranks) for ranks in (8, 512, 4096) for name in FILES]
FAST = ("gpt/fsdp.py", 512)
TOO_LARGE = 99999999999999999999


def dry_run(command, folder=ROOT):
    return run(
        sys.executable, "-W", "error", "-m", "tools.dry_run", *command.split(), folder=folder
    )


@pytest.mark.parametrize(
    ("name", "ranks"), first(1, [FAST, *(case for case in CASES if case != FAST)])
)
def test_many_ranks(name, ranks):
    """The mesh, and how much of each matrix rank 0 holds. Each rank evaluates a chunk at least."""
    options, mesh = FILES[name]
    result = dry_run(f"{ranks} {name} {options} --batch_size 8 --val_tokens {128 * ranks}")
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "without a gradient" not in result.stdout
    if mesh:
        mesh = mesh.format(n=ranks, half=ranks // 2, quarter=ranks // 4, eighth=ranks // 8)
        assert f"mesh: {mesh}\n" in result.stdout.replace(",", "")
    parameters = list(GPT(gpt_config(4, 2, 128, 64)).parameters())
    shards = {"gpt/pretrain.py": 1, "gpt/hsdp.py": 8}.get(name, ranks)
    if name not in ("gpt/tensor_parallel.py", "gpt/three_d.py"):
        held = sum(math.ceil(p.shape[0] / shards) * p[0].numel() for p in parameters)
        total = sum(p.numel() for p in parameters)
        assert f"parameters: {total:,}; rank 0 holds {held:,}, {4 * held:,} bytes" in result.stdout


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


@pytest.mark.long
def test_weight_without_a_gradient(tmp_path):
    """FSDP trains without a word, where DDP would stop in the second step."""
    line = "        self.head_size = config.n_embd // config.n_head\n"
    text = (ROOT / "gpt" / "fsdp.py").read_text()
    assert text.count(line) == 1
    unused = "        self.unused = nn.Linear(4, 4)\n"
    (tmp_path / "my_fsdp.py").write_text(text.replace(line, line + unused))
    result = dry_run(f"8 {tmp_path}/my_fsdp.py --n_layer 1")
    assert "without a gradient: blocks.0.unused.weight blocks.0.unused.bias\n" in result.stdout


MISTAKES = [  # the first is tried at each push
    ("8 nosuch.py", "there is no file nosuch.py"),
    (f"8 gpt/fsdp.py --seed {TOO_LARGE}", r"gpt/fsdp.py fails at `torch.manual_seed\(.*Overflow"),
    (f"8 gpt/slow_network.py --bucket_cap_mb {TOO_LARGE}", ".* at `self.model = .*TypeError"),
    (f"8 multinode.py --batch_size {TOO_LARGE}", ".* at `for .*ValueError: Stop argument"),
    ("512 gpt/hsdp.py --shard_size 3", "--shard_size 3 does not divide 512"),
    ("4096 multinode.py", "4,096 replicas have less than a sample"),
    ("8 gpt/pretrain.py --n_layer 32 --n_head 32 --n_embd 4096", "too little memory"),
]


@pytest.mark.parametrize(("command", "message"), first(1, MISTAKES))
def test_wrong_arguments(command, message):
    """One line, and no traceback, of what torchrun would show with one, or of wrong sizes."""
    result = dry_run(command)
    assert result.returncode == 1
    assert re.match(message, result.stderr) and result.stderr.count("\n") == 1, result.stderr
    if str(TOO_LARGE) in command:
        torchrun = f"torchrun --nproc_per_node=1 --master_port={free_port()} {command[2:]}"
        assert "Traceback" in run(*torchrun.split()).stderr


@pytest.mark.parametrize("name", first(0, ["elastic_ddp.py", "gpt/async_save.py"]))
def test_snapshots_are_left_alone(tmp_path, monkeypatch, name):
    """Neither read, which would fail, nor written."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if name == "elastic_ddp.py":
        (tmp_path / "snapshot.pt").write_text("no snapshot")
    result = dry_run(f"8 {ROOT / name}", tmp_path)
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "parameters: " in result.stdout
    texts = [path.read_text() for path in tmp_path.iterdir()]
    assert texts == ["no snapshot"] * (name == "elastic_ddp.py")
