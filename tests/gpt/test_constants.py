"""The constants of gpt/ against their sources: a plain loop, without any of the series' code.

test_shards.py compares the files with each other, which does not show what all have wrong.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from gpt_helpers import FLOAT64, SMALL, STEPS, start
from helpers import gpt_config, module, read_script
from torch import nn
from torch.nn import functional

from tools.launch.snapshots import load
from tools.steps import GPT

BETAS, EPS = (0.9, 0.95), 1e-8  # GPT-3 (arXiv 2005.14165), appendix B
WEIGHT_DECAY = 0.1  # the same; of matrices alone: nanoGPT, configure_optimizers
MAX_NORM = 1.0  # GPT-3, appendix B
LAST_RATE = 0.1  # of the highest, after a cosine: the same
STD = 0.02  # GPT-2's code, model.py; where a layer adds to the residual stream, 1 / sqrt(layers)
# of it: its report, section 2.3. A block has two such layers.
BIAS_STEP = 0.001  # DeepSeek-V3 (arXiv 2412.19437), section 4.2
WARMUP = 0.1  # of the steps, from a tenth of the highest rate: a choice of ours
FILES = [step.file for step in GPT[2:]]  # the first two have AdamW as torch makes it


@pytest.mark.parametrize("file", FILES)
def test_optimizer(file):
    optimizer = module(file).configure_optimizer(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), 1)
    for group in optimizer.param_groups:
        assert (group["betas"], group["eps"]) == (BETAS, EPS)
        for p in group["params"]:
            assert group["weight_decay"] == (WEIGHT_DECAY if p.dim() == 2 else 0)


RATES = {  # by warmup_steps: at some of 100 steps, in ten epochs; also where an epoch is begun
    None: {0: 0.1, 5: 0.55, 10: 1, 55: 0.55, 100: 0.1},
    20: {0: 0.1, 10: 0.55, 20: 1, 60: 0.55, 100: 0.1},
    200: {0: 0.1, 100: 0.55},  # more than there are
}


@pytest.mark.parametrize("file", FILES)
def test_learning_rate(file):
    loader = torch.utils.data.DataLoader(range(40), 4)
    for warmup_steps, expected in RATES.items():
        args = SimpleNamespace(learning_rate=1, total_epochs=10, warmup_steps=warmup_steps)
        for step, rate in expected.items():
            position = {"epochs_run": step // 10, "samples_run": step % 10 * 4}
            trainer = SimpleNamespace(train_loader=loader, args=args, **position)
            assert module(file).Trainer._learning_rate(trainer) == pytest.approx(rate)


@pytest.mark.parametrize("name", ["gpt", "pretrain"])
def test_weights(name):
    model = module(f"gpt/{name}.py").GPT(gpt_config(2, 2, 128, 64))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)  # so that all of them have to be set
    model.init_weights(seed=0)
    for parameter_name, parameter in model.named_parameters():
        adds = parameter_name.endswith(("proj.weight", "down.weight"))
        std = STD / math.sqrt(2 * 2) if adds else STD
        if parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(std, rel=0.05), parameter_name
        else:
            assert (parameter == (0 if parameter_name.endswith("bias") else 1)).all()


@pytest.mark.parametrize("name", ["moe", "expert_parallel"])
def test_bias_step(name, monkeypatch):
    """Of each expert, towards the mean load, whatever the distance."""
    script = module(f"gpt/{name}.py")
    monkeypatch.setattr(script.dist, "all_reduce", lambda loads: None)
    mixture = SimpleNamespace(load=torch.tensor([90, 0, 30, 0]), bias=torch.zeros(4))
    blocks = [SimpleNamespace(moe=mixture)]
    script.Trainer._balance_experts(SimpleNamespace(model=SimpleNamespace(blocks=blocks)))
    assert mixture.bias.tolist() == pytest.approx([-BIAS_STEP, BIAS_STEP, 0, BIAS_STEP])


@pytest.mark.parametrize("name", ["schedule.py", "pretrain.py"])
def test_training(shell, name):
    """The weights, after steps of which some are clipped."""
    setup = FLOAT64 + read_script("record_batches.py")
    start(shell, name, "s", 1, setup, "--learning_rate 0.02 --generate 0").succeeds()
    sizes = [int(size) for size in SMALL.split()[1::2]]
    model = module(f"gpt/{name}").GPT(gpt_config(*sizes)).double()
    model.load_state_dict(torch.load(shell.folder / "initial"))
    parameters = [*model.parameters()]
    means = [torch.zeros_like(p) for p in parameters]
    squares = [torch.zeros_like(p) for p in parameters]
    batches = torch.load(shell.folder / "batches")
    assert len(batches) == STEPS
    for step, (inputs, targets) in enumerate(batches):
        done = step / STEPS
        rate = LAST_RATE + (1 - LAST_RATE) * done / WARMUP
        if done >= WARMUP:
            cosine = math.cos(math.pi * (done - WARMUP) / (1 - WARMUP))
            rate = LAST_RATE + (1 - LAST_RATE) * (1 + cosine) / 2
        rate *= 0.02
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        gradients = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        for p, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
            gradient = gradient * min(1, MAX_NORM / (norm + 1e-6))
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient**2, 1 - BETAS[1])
            unbiased = mean / (1 - BETAS[0] ** (step + 1))
            root = (square / (1 - BETAS[1] ** (step + 1))).sqrt()
            decay = WEIGHT_DECAY if p.dim() == 2 else 0.0
            p.data -= rate * (decay * p.data + unbiased / (root + EPS))
    found = load(shell.folder / "s")["model"]
    expected = model.state_dict()
    assert max((found[key] - expected[key]).abs().max() for key in expected) < 1e-10
