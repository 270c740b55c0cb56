"""bench/memory.py: what a block keeps, and the peak of a rank as the system counts it."""

import pytest
import torch
from helpers import gpt_config

from bench import memory, memory_peaks
from gpt.pretrain import GPT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_keeps(dtype):
    """Counted with the hooks for saved tensors, without the weights that autocast converts."""
    model = GPT(gpt_config(n_layer=1, n_head=4, n_embd=128, context=64))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def count(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.zeros(8, 64, 128, requires_grad=True)
    with (
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor),
    ):
        model.blocks[0](x)
    counted = sum(size for address, size in storages.items() if address not in parameters)
    if dtype != torch.float32:
        matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2)
        counted -= dtype.itemsize * matrices
    shape = memory.GPT(0, 1, 128, 256, 64)
    kept, _ = memory.activations(shape, 8, dtype.itemsize, 4, recompute=False, tp=1)
    assert kept == pytest.approx(counted, rel=0.02)


def test_flops_are_those_of_the_script():
    model = GPT(gpt_config(n_layer=2, n_head=4, n_embd=128, context=64))
    params = sum(p.numel() for p in model.parameters())
    assert memory.GPT(params, 2, 128, 256, 64).flops_per_token == model.flops_per_token


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("run", [memory_peaks.RUNS[n] for n in (3, 4, 7, 10)], ids=str)
def test_measured_peak(run):
    """Of the runs that docs/choose.md sums up: losses compiled or in chunks, and shards."""
    predicted, measured = memory_peaks.run(*run)
    print(predicted, measured)
    assert predicted == pytest.approx(measured, rel=0.1)
