"""tools/formulas/memory.py: what a block keeps; bench/memory_peaks.py measures whole ranks."""

import importlib

import pytest
import torch
from helpers import gpt_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gpt.pretrain import GPT
from tools.formulas import memory

SAMPLES, CONTEXT, N_EMBD = 8, 8, 384
LLAMA = {"n_kv_head": 1, "n_hidden": N_EMBD * 8 // 3, "norm_eps": 1e-6, "rope_theta": 1e4}
OPTIONS = {"pretrain": {}, "fsdp": {}, "llama": LLAMA, "documents": LLAMA}
MIXTURE = {"n_experts": 4, "top_k": 2}


class Storages(TorchDispatchMode):
    """Notes the memory that operations return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [t.untyped_storage() for t in tree_leaves(result) if torch.is_tensor(t)]
        self.sizes |= {StorageWeakRef(storage): storage.nbytes() for storage in storages}
        return result


def bytes_kept(name, options, dtype, recompute, monkeypatch):
    """Counted after the forward pass; the output stands for the input, which is kept, too."""
    # A GPU's rms_norm keeps its input, like layer_norm; that of CPUs keeps several results.
    norm = functional.layer_norm
    monkeypatch.setattr(functional, "rms_norm", lambda x, s, weight, eps: norm(x, s, weight))
    config = gpt_config(1, 4, N_EMBD, CONTEXT, **options)
    block = importlib.import_module(f"gpt.{name}").Block(config)
    stream_dtype = torch.float32 if name == "pretrain" else dtype  # with autocast
    block.to(stream_dtype)  # as FSDP casts weights
    if name == "moe":
        block.moe.router.float()
    inputs = [torch.zeros(SAMPLES, CONTEXT, N_EMBD, dtype=stream_dtype, requires_grad=True)]
    if name == "documents":  # whose mask all blocks share
        inputs += [torch.zeros(SAMPLES, 1, CONTEXT, CONTEXT, dtype=dtype)]
    storages = Storages()
    storages.sizes = {}
    with storages, torch.autocast("cpu", dtype, enabled=dtype != stream_dtype):
        output = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
    for tensor in [*block.parameters(), *inputs]:
        storages.sizes.pop(StorageWeakRef(tensor.untyped_storage()), None)
    counted = sum(size for storage, size in storages.sizes.items() if not storage.expired())
    if dtype != stream_dtype and not recompute:  # the weights that autocast has converted
        counted -= dtype.itemsize * sum(p.numel() for p in block.parameters() if p.dim() == 2)
    assert output.dtype == stream_dtype
    return counted


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_block_keeps(name, dtype, recompute, monkeypatch):
    block = memory.BLOCK_TYPES["llama" if OPTIONS[name] else "gpt"]
    shape = memory.GPT(0, 1, N_EMBD, 256, CONTEXT, block)
    stream_bytes = 4 if name == "pretrain" else dtype.itemsize
    kept, _ = memory.activations(shape, SAMPLES, dtype.itemsize, stream_bytes, recompute, tp=1)
    counted = bytes_kept(name, OPTIONS[name], dtype, recompute, monkeypatch)
    assert kept == pytest.approx(counted, rel=0.02)


def test_what_a_mixture_keeps(monkeypatch):
    """The number of docs/choose.md, per token and channel."""
    counted = bytes_kept("moe", MIXTURE, torch.bfloat16, False, monkeypatch)
    assert counted / (SAMPLES * CONTEXT * N_EMBD) == pytest.approx(58, rel=0.02)


def test_flops_are_those_of_the_script():
    model = GPT(gpt_config(n_layer=2, n_head=4, n_embd=128, context=64))
    params = sum(p.numel() for p in model.parameters())
    assert memory.GPT(params, 2, 128, 256, 64).flops_per_token == model.flops_per_token
