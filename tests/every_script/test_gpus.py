"""The branches for GPUs: on pretended ones everywhere, and on real ones where there are any."""

import os
import re
import shutil

import pytest
import torch
from gpt_helpers import options_of
from helpers import IGNORED, LONG, NAMES, SCRIPTS, SHORT_GPT, first, patch, run
from rankcheck.launch.jobs import environment, pretend_gpus
from torch.utils._pytree import tree_leaves

from gpt import muon
from tools.launch.snapshots import load, load_gpt
from tools.steps import ROOT, STAGES

LONGER = [name for name in SCRIPTS if name != "elastic_ddp.py"]
LONGER += ["recipes/mixed_precision.py", "by_hand/fsdp.py", "gpt/gpt.py", "gpt/fsdp.py"]
LONGER += ["gpt/tensor_parallel.py"]
OTHERS = [name for name in NAMES if name not in ["elastic_ddp.py", *LONGER]]
THREE_D = "--pp_size 2 --tp_size 2 --micro_batches 2 --n_layer 2"
WIDE = [  # on more ranks, where there are so many GPUs
    ("elastic_ddp.py", 4, ""),
    ("gpt/hsdp.py", 4, "--shard_size 2"),
    ("gpt/expert_parallel.py", 4, "--n_experts 4 --top_k 4 --ep_size 4"),
    ("gpt/three_d.py", 4, THREE_D),
    ("gpt/three_d.py", 8, THREE_D),
]
# SyncBatchNorm on several GPUs is BatchNorm on one process, if no rank takes a sample twice.
EVEN_DIGITS = """
Digits = script.Digits
script.Digits = lambda: script.Subset(Digits(), range(1600))
"""
# The others load their snapshots as one of these does.
GPT = ["gpt/gpt.py", "gpt/dcp.py", "gpt/fsdp.py", "gpt/local_sgd.py", "gpt/muon.py"]
RESUMED = [*SCRIPTS, *GPT]


def weights(path):
    snapshot = load_gpt(path)
    tensors = [leaf for leaf in tree_leaves(snapshot) if isinstance(leaf, torch.Tensor)]
    # Whatever the script computes in.
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float32}
    model = snapshot.get("model") or snapshot["node_0"]["model"]
    return torch.cat([weight.flatten().double().cpu() for weight in model.values()])


def check(shell, name, ranks, options, start_on_gpus, max_diff, setup=""):
    """Asserts that two epochs on GPUs are as on CPUs; of some, the second is resumed."""
    options = options_of(shell, name, options)
    if ranks == 1:
        options = options.replace("_size 2", "_size 1")
    script = twin = name
    more, ranks_on_cpus = "", ranks
    totals = (1, 2) if name in RESUMED else (2,)
    if name == "multigpu.py":  # which starts its ranks itself, and so takes long
        twin = "multigpu_torchrun.py"
        totals = (2,)
    elif name == "recipes/mixed_precision.py":
        twin = "multinode.py"
        script += " --dtype float16"
    elif name.startswith("gpt/"):
        script = twin = patch(shell.folder, name, SHORT_GPT + setup)
    elif name == "recipes/images.py":
        script = twin = patch(shell.folder, name, EVEN_DIGITS + setup)
        if not setup:  # pretended GPUs have BatchNorm, too
            more, ranks_on_cpus = f"--batch_size {32 * ranks}", 1
    options = f"1 {options} --snapshot_path {shell.folder}"
    for epochs in totals:
        output = start_on_gpus(f"{script} {epochs} {options}/gpu").succeeds()
    assert f"{totals[0] % 2} of 2 epochs done" in output and "steps per epoch, on cuda" in output
    if not name.startswith("gpt/"):  # whose learning rate depends on the number of epochs
        totals = (2,)
    for epochs in totals:
        shell.ranks(f"{twin} {epochs} {options}/cpu {more}", ranks_on_cpus).succeeds()
    expected = weights(shell.folder / "cpu")
    diff = weights(shell.folder / "gpu") - expected
    assert diff.norm() < max_diff * expected.norm()
    # Autocast leaves pretended GPUs alone, but this policy of FSDP computes in bfloat16 there.
    if "MixedPrecisionPolicy(" in (ROOT / name).read_text():
        assert diff.norm() > 1e-6 * expected.norm()


# Pretended GPUs have no kernel for SyncBatchNorm, and none of FlexAttention, do not gather a whole
# model to export it, and have another name where tensors are recomputed.
NOT_PRETENDED = """
script.create_block_mask = getattr(script, "create_mask", None)
torch.compile = lambda function, **options: function
script.nn.SyncBatchNorm.convert_sync_batchnorm = lambda model: model
script.export = lambda *arguments: None
if hasattr(script, "MixedPrecisionPolicy"):
    torch.autocast = None  # the policy casts in its place
if hasattr(script, "chunked_loss"):
    script.checkpoint = functools.partial(script.checkpoint, determinism_check="none")
"""


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("elastic_ddp.py", 2, None),
        *first(0, [(name, 1 if name == "singlegpu.py" else 2, None) for name in LONGER], LONG),
        *first(0, [*((name, 2, None) for name in OTHERS), *WIDE]),
    ],
)
def test_pretended_gpus(shell, name, ranks, options):
    def start(command):
        if name == "multigpu.py":
            return shell.start(f"python {command}", **pretend_gpus(ranks))
        return shell.ranks(command, ranks, **pretend_gpus(ranks))

    # In bfloat16 they differ by up to 1e-3; at 1.2 times the learning rate, by 1e-2.
    max_diff = 2e-3 if name.startswith("gpt/") else 1e-3
    check(shell, name, ranks, options, start, max_diff, NOT_PRETENDED)


def test_attention_of_documents_is_compiled(shell):
    """Else FlexAttention would keep the scores of all pairs of tokens; with TF32, else it warns."""
    precision = "torch.get_float32_matmul_precision()"
    setup = f'script.Attention.compile = lambda self, dynamic: print("compiled", {precision})'
    setup += "\nscript.Trainer.train = lambda self: None"
    script = patch(shell.folder, "gpt/documents.py", setup)
    options = options_of(shell, "gpt/documents.py")
    job = shell.ranks(f"{script} 1 {options} --n_layer 3", **pretend_gpus(1))
    assert job.succeeds().count("compiled high\n") == 3


def test_muon_in_bfloat16(monkeypatch):
    """On GPUs, where float32 would take far longer; what it returns has the type it got.

    In float64, nothing is rounded: whoever compares two runs so looks for a mistake.
    """
    matrix = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    for is_cuda in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_cuda", is_cuda)
        update = muon.orthogonalize(matrix)
        assert update.dtype == torch.float32
        assert torch.equal(update, update.bfloat16().float()) == is_cuda
        update = muon.orthogonalize(matrix.double())
        assert not torch.equal(update, update.float().double())
        assert not muon.orthogonalize(0 * matrix).any()  # as where no gradient reaches a matrix


# What this rank holds, which is a whole replica in this test.
RECORD_WEIGHTS = """
@after(script.Trainer, "train")
def record_weights(self):
    weights = [weight.to_local().flatten() for weight in self.model.state_dict().values()]
    torch.save(torch.cat(weights).cpu(), f"{os.environ['OUT']}/rank-{os.environ['RANK']}")
"""


@pytest.mark.parametrize(
    ("name", "options"),
    first(1, [("gpt/hsdp.py", "--shard_size 1"), ("gpt/local_sgd.py", "--sync_every 5")], LONG),
)
def test_replicas_on_gpus_of_two_types(shell, name, options):
    """Only what all replicas draw alike stays alike in them: nothing sends the weights."""
    options += f" --snapshot_path {shell.folder}/s {options_of(shell, name)}"
    script = patch(shell.folder, name, SHORT_GPT + RECORD_WEIGHTS)
    nodes = [shell.folder / "node1", shell.folder / "node2"]
    job = shell.ranks_on(nodes, f"{script} 1 1 {options}", OUT=str(shell.folder), **pretend_gpus(1))
    job.succeeds()
    assert torch.equal(load(shell.folder / "rank-0"), load(shell.folder / "rank-1"))


PRINT_KINDS = """
@after(script.Trainer, "train")
def print_kinds(self):
    fused = all(group["fused"] for group in self.optimizer.param_groups)
    print("fused", fused, "on", self.device)
    buckets = {p.grad.untyped_storage().data_ptr() for p in self.model.parameters()}
    print("gradients in", len(buckets), "bucket")
@before(script, "next_byte_loss")
def print_autocast(logits, targets):
    print("autocast", torch.is_autocast_enabled("cuda"))
"""


def test_snapshots_of_other_devices(shell):
    """AdamW's state_dict also says how to compute a step; a snapshot of a CPU slows no GPU down."""
    options = f"--snapshot_path {shell.folder}/s {options_of(shell, 'gpt/pretrain.py')}"
    script = patch(shell.folder, "gpt/pretrain.py", SHORT_GPT + PRINT_KINDS)
    for epochs, device in enumerate(["cpu", "cuda:0", "cpu"], 1):
        variables = pretend_gpus(1) if device == "cuda:0" else {}
        output = shell.ranks(f"{script} {epochs} 1 {options}", **variables).succeeds()
        assert f"{epochs - 1} of {epochs} epochs done" in output
        assert f"on {device}" in output and "fused False on cuda" not in output
        assert "gradients in 1 bucket\n" in output  # that of DDP
        on_gpu = device == "cuda:0"  # in training and evaluation
        assert set(re.findall(r"autocast (\w+)", output)) == {str(on_gpu)}
        assert ("peak memory 0.0 GiB" in output) == on_gpu


def test_check_cluster_on_pretended_gpus(shell):
    smaller = "script.MATMUL_SIZE['cuda'] = 64; script.MATMUL_SECONDS['cuda'] = 0.1"
    one_way = "lambda sends, *_: 1 if sends == (script.dist.get_rank() == 0) else 0.25"
    setup = f"{smaller}\nscript.measure_direction = {one_way}\nscript.main()\nsys.exit()"
    script = patch(shell.folder, "slurm/check_cluster.py", setup)
    nodes = [shell.folder / "node1", shell.folder / "node2"]
    job = shell.ranks_on(nodes, str(script), **pretend_gpus(1))
    assert job.succeeds().count(" TFLOP/s       0.25 Gbit/s") == 2


FIRST_FILES = ["stages/test_training", "stages/test_preemptible", "every_script/test_one_rank"]
MORE_FILES = [*FIRST_FILES, "recipes/test_recipes", "by_hand/test_by_hand", "pages/test_hangs"]
MORE_FILES += ["every_script/test_bad_input", "every_script/test_own_changes"]
GPT_FILES = ["gpt", "local_sgd", "pretrain", "shards", "snapshots", "steps"]
MORE_FILES += [f"gpt/test_{name}" for name in GPT_FILES]


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpus", "files"), first(1, [(1, FIRST_FILES), *((n, MORE_FILES) for n in (1, 2, 8))])
)
def test_suite_on_a_machine_with_gpus(gpus, files):
    """The tests leave the machine's GPUs alone, but for those marked gpu."""
    env = environment() | pretend_gpus(gpus)
    del env["CUDA_VISIBLE_DEVICES"], env["TEST_GPUS"]
    marks = "not (path or long or gpu)"
    files = [f"tests/{file}.py" for file in files]
    result = run("python", "-m", "pytest", "-n", "0", "-m", marks, *files, env=env)
    assert result.returncode == 0, result.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", [1, 2])
def test_make_run_on_a_machine_with_gpus(tmp_path, gpus):
    """On one GPU, what has more than one process trains on the CPU, and the table says so."""
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True)
    env = environment() | pretend_gpus(gpus)
    result = run("python", "-m", "tools.chain.run", "--no-slurm", folder=copy, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[-len(STAGES) :]]
    assert [row[0] for row in rows] == STAGES
    on_gpus = 3 if gpus == 1 else 6  # elastic_ddp.py, of which a node is killed, uses none
    assert [row[1] for row in rows] == ["cuda"] * on_gpus + ["cpu"] * (len(STAGES) - on_gpus)
    assert len({tuple(row[2:8]) for row in rows}) == 1  # the losses


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "ranks", "options"), [(name, 2, None) for name in NAMES] + WIDE)
def test_real_gpus(shell, name, ranks, options):
    gpus = os.environ["TEST_GPUS"].split(",")
    if ranks > max(2, len(gpus)):
        pytest.skip(f"needs {ranks} GPUs")
    ranks = 1 if name == "singlegpu.py" else min(ranks, len(gpus))
    launcher = f"torchrun --standalone --nproc_per_node={ranks}"
    if name in ("singlegpu.py", "multigpu.py"):
        launcher = "python"
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first_gpu = worker * ranks % len(gpus)  # others for each worker, where there are so many
    visible = ",".join((gpus + gpus)[first_gpu : first_gpu + ranks])
    compiled = "--compile" * ('"--compile"' in (ROOT / name).read_text())

    variables = {"CUDA_VISIBLE_DEVICES": visible, "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    max_diff = 1e-3
    if name == "recipes/mixed_precision.py":
        max_diff = 1e-2
    elif name.startswith("gpt/"):
        max_diff = 4e-3  # in bfloat16, see above
    elif name == "recipes/images.py":  # without SyncBatchNorm, the difference would be 2e-3
        variables["NVIDIA_TF32_OVERRIDE"] = "0"  # in which a GPU convolves

    def start(command):
        return shell.start(f"{launcher} {command} {compiled}", **variables)

    check(shell, name, ranks, options, start, max_diff)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [200, 256])
def test_attention_of_documents_on_real_gpus(shell, monkeypatch, context):
    """Below 128 tokens, FlexAttention has another kernel; it pads what 128 does not divide."""
    monkeypatch.setattr("gpt_helpers.CONTEXT", context)
    test_real_gpus(shell, "gpt/documents.py", 2, None)
