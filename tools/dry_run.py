"""Runs rank 0 of a large job, alone and on the CPU, to find mistakes before the queue

    python -m tools.dry_run 512 gpt/three_d.py 50 10 --pp_size 4 --tp_size 8 --n_head 8

The model is built on the meta device, where tensors have a shape but no memory, and sharded as in
the job. If it is small, it takes one step through torch's fake backend, whose collectives return at
once and send nothing: values are meaningless. Nothing is saved, and no snapshot is read.

Private parts of torch, as of 2.13.0, each imported where it is used: for all scripts, FakeStore of
torch.testing._internal; for pipelines, PipelineStage._recv_meta and _stage_meta, and of
pipelining._utils _derive_grad_metas and _StageBackwardMeta.
"""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import traceback
from functools import partialmethod
from importlib.util import module_from_spec, spec_from_file_location

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tools.formulas.calculator import BFLOAT16, USABLE_MEMORY
from tools.formulas.memory import FLOAT32, GPT, block_of, memory
from tools.formulas.scaling import H100

MAX_BYTES = 2e9  # of a step here, where no layer is sharded
STATES = 3  # at least: a weight, its gradient, the momentum
# A script with one of these keeps other activations, or more states, than the calculator counts.
NOT_CALCULATED = {"cp_size", "ep_size", "sync_every"}


def fake_collectives(ranks):
    """Makes this process rank 0 of many, and mends what the fake backend leaves undone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init, new_group = dist.init_process_group, dist.new_group

    def finish(state, bucket):  # as a hook of DDP, which waits for a future
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def wrap(model, ddp=nn.parallel.DistributedDataParallel, **options):
        if not next(model.parameters()).is_meta:
            model = ddp(model, **options)
            model.register_comm_hook(None, finish)
        model.register_comm_hook = lambda state, hook: None
        return model

    def gradients_like_outputs(stage, next_stage):
        from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta

        return _StageBackwardMeta(_derive_grad_metas(stage._stage_meta.outputs))

    fake = {"backend": "fake", "store": FakeStore(), "rank": 0, "world_size": ranks}
    dist.init_process_group = lambda *args, **options: init(**fake)
    dist.new_group = lambda *args, backend=None, **options: new_group(*args, **options)
    dist.rendezvous = lambda url: iter([(dist.HashStore(), 0, ranks)])
    dist.all_to_all_single = lambda output, rows, *args, **options: output.copy_(rows)
    nn.parallel.DistributedDataParallel = wrap
    PipelineStage._recv_meta = gradients_like_outputs


def shape_of(model, args):
    """Returns what the calculator knows a GPT by."""
    params = sum(p.numel() for p in model.parameters())
    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    heads = [m for m in model.modules() if isinstance(m, nn.Linear)]
    is_tied = any(head.weight is embedding.weight for head in heads)
    sizes = (args.n_layer, args.n_embd, embedding.num_embeddings, args.context)
    return GPT(params, *sizes, block_of(vars(args)), is_tied)


def init_on_meta(model, run, init, *args, **options):
    """Is the `__init__` of each model of a script."""
    with torch.device("meta"):
        init(model, *args, **options)
    if type(model).__name__ == "GPT":
        run.shape = shape_of(model, run.args)


def place(model, run, to_empty, *args, **options):
    """Puts a model on this machine if a step fits, or leaves it where it is."""
    if not any(p.is_meta for p in model.parameters()):
        return model
    run.step_bytes = 4 * FLOAT32 * sum(p.numel() for p in model.parameters())
    if run.shape:
        run.step_bytes = memory(run.shape, run.args.batch_size, FLOAT32)["peak"]
    if run.step_bytes <= MAX_BYTES:
        to_empty(model, device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.detach().zero_()
    return model


def build_on_meta(run, script):
    """Has the models of a script stay on the meta device, unless a step fits on this machine."""
    for value in list(vars(script).values()):
        if isinstance(value, type) and issubclass(value, nn.Module):
            value.__init__ = partialmethod(init_on_meta, run, value.__init__)
            value.init_weights = lambda model, seed: None
    nn.Module.to = nn.Module.to_empty = partialmethod(place, run, nn.Module.to_empty)


def train(run, path):
    """Runs `main` of the script at `path`, which ends with the first batch."""
    spec = spec_from_file_location("script", path)
    script = sys.modules["script"] = module_from_spec(spec)
    spec.loader.exec_module(script)
    run.args = script.parse_args()
    fake_collectives(run.ranks)
    build_on_meta(run, script)
    run_batch = script.Trainer._run_batch
    init_mesh = getattr(script, "init_device_mesh", None)

    def run_first_batch(trainer, inputs, targets):
        def note_unused(optimizer, *args):
            weights = [p for group in optimizer.param_groups for p in group["params"]]
            unused = {p for p in weights if p.requires_grad and p.grad is None}
            run.unused += [n for n, p in trainer.model.named_parameters() if p in unused]

        if run.step_bytes <= MAX_BYTES:
            register_optimizer_step_pre_hook(note_unused)
            run_batch(trainer, inputs, targets)
        run.trainer, run.rows = trainer, len(inputs)
        raise SystemExit(0)  # for which torch's @record returns

    def record_mesh(*args, **options):
        run.meshes.append(init_mesh(*args, **options))
        return run.meshes[-1]

    script.Trainer._run_batch = run_first_batch
    script.Trainer._save_snapshot = lambda trainer: None  # elastic_ddp.py saves as it exits
    script.init_device_mesh = record_mesh
    script.set_model_state_dict = script.load_pretrained = lambda *args, **options: None
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        others = {"snapshot_path": f"{folder}/none", "compile": False}  # to compile takes minutes
        script.main(argparse.Namespace(**vars(run.args) | others))


def peak(run, held):
    """Returns the calculator's peak in bytes, or 0 if it does not count what this script keeps."""
    options = vars(run.args)
    if not run.shape or "recompute" not in options or NOT_CALCULATED & options.keys():
        return 0
    samples = min(options.get("micro_batch_size", run.args.batch_size), run.args.batch_size)
    samples //= options.get("micro_batches", 1)
    shards = run.shape.params / held
    split = (options.get("tp_size", 1), options.get("pp_size", 1), run.args.compile)
    split += (options.get("loss_chunks", 1),)
    return memory(run.shape, samples, BFLOAT16, shards, run.args.recompute, *split)["peak"]


def report(run):
    """Prints the job's sizes; exits if its samples or the GPU's memory do not suffice."""
    params = list(run.trainer.model.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in params)
    total = run.shape.params if run.shape else sum(p.numel() for p in params)
    loader = run.trainer.train_loader
    sampler = loader.sampler if hasattr(loader.sampler, "num_replicas") else loader.batch_sampler
    samples = getattr(sampler, "global_batch_size", run.rows * sampler.num_replicas)
    available = len(sampler.dataset)
    for mesh in run.meshes:
        sizes = zip(mesh.mesh_dim_names or ["shard"], mesh.shape, strict=True)
        print("mesh:", " x ".join(f"{name} {size:,}" for name, size in sizes))
    print(f"parameters: {total:,}; rank 0 holds {held:,}, {FLOAT32 * held:,} bytes")
    tokens = f", {samples * run.args.context:,} tokens" if "context" in run.args else ""
    print(f"per step: {samples:,} samples{tokens}")
    print(f"per epoch: {len(loader):,} steps, {available:,} samples")
    if needed := peak(run, held):
        print(f"peak: {needed / 1e9:,.1f} GB in bfloat16, of {run.gpu_memory / 1e9:,.0f} GB")
    else:
        needed = STATES * FLOAT32 * held
        print(f"peak: not calculated for this script; more than {needed / 1e9:,.1f} GB")
    if run.unused:
        print("without a gradient:", *run.unused)
    if run.step_bytes > MAX_BYTES:
        print(f"not computed: on this machine, a step takes {run.step_bytes / 1e9:,.0f} GB")
    if min(samples, available) < sampler.num_replicas:
        sys.exit(
            f"{sampler.num_replicas:,} replicas have less than a sample each per step or epoch"
        )
    if needed > USABLE_MEMORY * run.gpu_memory:
        sys.exit("too little memory: use more shards, --recompute or a smaller --batch_size")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--gpu_memory", type=float, default=80e9, help="in bytes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    defaults = argparse.Namespace(shape=None, meshes=[], step_bytes=0, trainer=None, unused=[])
    run = parser.parse_args(namespace=defaults)
    local = min(run.ranks, H100.gpus_per_node)
    if local < 1 or run.ranks % local:
        parser.error("ranks must be fewer than the 8 of a node, or a multiple of that")
    if not os.path.isfile(run.script):
        sys.exit(f"there is no file {run.script}")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"WORLD_SIZE": f"{run.ranks}", "LOCAL_WORLD_SIZE": f"{local}"}
    os.environ["GROUP_WORLD_SIZE"] = f"{run.ranks // local}"
    sys.argv = [run.script, *run.arguments]
    path = os.path.abspath(run.script)
    try:
        train(run, path)
    except SystemExit:
        if run.trainer is None:  # the script's own message
            raise
    except Exception as error:
        lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        message = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        sys.exit(f"{run.script} fails at `{(lines or ['its start'])[-1]}`: {message}")
    report(run)


if __name__ == "__main__":
    main()
