"""The mixture of gpt/moe.py: what a layer computes, what a token costs, and that loads get even.

test_shards.py shows that it and gpt/expert_parallel.py train alike on any number of ranks.
"""

import argparse
import re

import pytest
import torch
from gpt_helpers import TINY, write_tiny_text
from helpers import SHORT_GPT, SHORT_VAL, fences, gpt_config, patch, start
from torch.nn import functional

from gpt import fsdp, moe
from tools.launch.snapshots import write_text


def dense_mixture(layer, x):
    """Computes, token by token, the sum over the experts that have the highest scores."""
    up, down = layer.experts.up, layer.experts.down
    outputs = []
    for token in x.flatten(0, 1):
        scores = (layer.router.weight @ token).sigmoid()
        best = sorted(range(len(scores)), key=lambda e: scores[e] + layer.bias[e])[-layer.top_k :]
        outputs.append(sum(scores[e] * (functional.gelu(token @ up[e]) @ down[e]) for e in best))
    return torch.stack(outputs).view_as(x)


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_layer_is_a_dense_mixture(top_k):
    """Its outputs, and all gradients; the bias decides who is selected, and has no gradient."""
    torch.manual_seed(0)
    layer = moe.MixtureOfExperts(16, 8, top_k).double()
    for tensor in layer.state_dict().values():
        tensor.normal_(std=0.3)
    x = torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True)
    leaves = [x, *layer.parameters()]
    found = layer(x)
    expected = dense_mixture(layer, x)
    assert (found - expected).abs().max() < 1e-12
    gradients = torch.autograd.grad(found.square().sum(), leaves)
    for gradient, other in zip(
        gradients, torch.autograd.grad(expected.square().sum(), leaves), strict=True
    ):
        assert (gradient - other).abs().max() < 1e-12
    with torch.no_grad():
        layer(x)  # as an evaluation does: it does not count
    assert layer.load.sum() == 10 * top_k
    layer.bias.zero_()
    assert top_k == 8 or not torch.equal(layer(x), found)


@pytest.mark.parametrize("name", ["gpt/moe.py", "gpt/expert_parallel.py"])
def test_router_is_in_float32(shell, name):
    """With --compile, too, for which the other files ask for TF32."""
    write_tiny_text(shell)
    setup = "script.Trainer.train = lambda self: print(torch.get_float32_matmul_precision())\n"
    options = f"1 {TINY} {SHORT_VAL} --text text --compile --generate 0 --n_experts 2 --top_k 1"
    assert "highest" in start(shell, name, options, SHORT_GPT + setup, 1).succeeds()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product(dtype):
    """The lines of the page compute what the loop does, for an expert without rows, too."""
    namespace = {"F": functional, "torch": torch}
    exec(fences("gpt/moe.md", "python")[0], namespace)
    experts = moe.Experts(16, 4).to(dtype)
    for weights in experts.parameters():
        weights.data.normal_(std=0.3)
    inputs = torch.randn(20, 16, dtype=dtype, requires_grad=True)
    expert_ids = torch.randint(3, (20,))
    found = namespace["forward"](experts, inputs, expert_ids)
    expected = experts(inputs, expert_ids)
    leaves = [inputs, *experts.parameters()]
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(y.sum(), leaves) for y in (found, expected)), strict=True)
    for tensor, other in pairs:
        torch.testing.assert_close(tensor, other)


def test_router_in_bfloat16():
    """It would send one token in seven to other experts, as the page says."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4096, 1024, generator=generator)
    router = 0.02 * torch.randn(256, 1024, generator=generator)
    selected = []
    for dtype in (torch.float32, torch.bfloat16):
        scores = (tokens.to(dtype) @ router.to(dtype).T).sigmoid()
        selected.append(scores.topk(8).indices.sort().values)
    changed = (selected[0] != selected[1]).any(1).float().mean()
    assert 1 / 8 < changed < 1 / 6


def test_flops_of_active_experts():
    """Those of a GPT whose MLPs have the weights of a token's experts, and the router's."""
    n_layer, n_embd = 3, 64
    sizes = (n_layer, 2, n_embd, 32)
    dense = fsdp.GPT(gpt_config(*sizes)).flops_per_token
    second_mlp = 6 * n_layer * 8 * n_embd**2
    for n_experts in (2, 8):
        router = 6 * n_layer * n_embd * n_experts
        mixture = moe.GPT(gpt_config(*sizes, n_experts=n_experts, top_k=2))
        assert mixture.flops_per_token == dense + second_mlp + router
        assert mixture.shape.endswith(f"n_experts={n_experts}, top_k=2")  # kept in a snapshot


# As on GPUs; and memory that nothing sets is nan.
MIXED_PRECISION = """
torch.cuda.is_bf16_supported = lambda including_emulation: True
torch.use_deterministic_algorithms(True)
@after(script.MixtureOfExperts, "__init__")
def print_type(self, *sizes):
    self.router.register_forward_hook(lambda *call: print("scores:", call[-1].dtype))
"""


def test_router_in_mixed_precision(shell):
    """It scores in float32, and with the biases that it has: not what was in memory."""
    write_text(shell.folder / "text", 20, 8)
    options = "1 --n_layer 1 --context 8 --val_tokens 8 --text text"
    job = start(shell, "gpt/moe.py", options, MIXED_PRECISION, 1)
    assert {*re.findall("scores: (.+)", job.succeeds())} == {"torch.float32"}


LOG_LOADS = """
@before(script.Trainer, "_balance_experts")
def log_loads(self):
    print("load", *self.model.blocks[0].moe.load.tolist())
"""
NOT_BALANCED = """
def count_anew(self):
    for block in self.model.blocks:
        block.moe.load = 0
script.Trainer._balance_experts = count_anew
"""


@pytest.mark.long
def test_loads_get_even(shell):
    """Without the biases, two of eight experts get nearly all tokens of a batch."""
    jobs = []
    for name, setup in (("balanced", ""), ("not_balanced", NOT_BALANCED)):
        setup = SHORT_GPT + setup + LOG_LOADS
        script = patch(shell.folder, "gpt/moe.py", setup, f"{name}.py")
        options = f"--text {argparse.__file__} --val_tokens 1024 --batch_size 16"
        options += " --n_layer 1 --n_embd 32 --context 32 --n_experts 8 --top_k 2"
        jobs.append(shell.ranks(f"{script} 1 {options} --snapshot_path {name}"))
    imbalances = []  # the load of the busiest expert, divided by the mean, in the last ten steps
    for job in jobs:
        lines = re.findall(r"load ([\d ]+)", job.succeeds())
        loads = torch.tensor([[float(load) for load in line.split()] for line in lines])
        assert len(loads) > 100 and (loads.sum(1)[:-1] == 2 * 16 * 32).all()
        imbalances.append((loads.amax(1) / loads.mean(1))[-10:].mean().item())
    print("balanced, and not:", imbalances)
    assert imbalances[0] < 2.5 < 3.5 < imbalances[1]
