"""What docs/recipes/verify.md claims: faults that ranks are made to have are found and named."""

import re

import pytest
from helpers import BATCH_NORM_AND_DROPOUT, at_step, fences, patch, read_script, start, weights_diff
from rankcheck.launch.jobs import pretend_gpus

FLIP_BIT = "self.model.module.net2.weight.data.view(torch.int32)[3, 4] ^= rank == 1"
# Weights that DDP does not see: no gradient, or not there when it was made.
FROZEN = """
class Model(script.ToyModel):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
script.ToyModel = Model
"""
CHANGE_FROZEN = "self.model.module.scale += 1e-7 * (rank == 2)"
LATE = "self.model.module.late = nn.Parameter(torch.rand(3))"
# No sampler, or the wrong one.
SAME_SHARD = """
sampler = script.DistributedSampler
def sampler_of_rank_0_for_rank_2(dataset, seed):
    return sampler(dataset, rank=script.dist.get_rank() % 2, seed=seed)
script.DistributedSampler = sampler_of_rank_0_for_rank_2
"""
OWN_ORDER = read_script("own_order.py")
SAME_SEED = """
manual_seed = torch.manual_seed
def seed_without_rank(seed):
    manual_seed(0)
torch.manual_seed = seed_without_rank
"""
# What the data set returns on rank 1: in another order, with other labels, or its half.
OWN_DATA = """
@after(script.ToyDataset, "__init__")
def change_data(self, size):
    if os.environ["RANK"] == "1":
        order = torch.arange(size)
        self.inputs, self.targets = {data}
"""
OTHER_DATA = {
    "order": "self.inputs.flip(0), self.targets.flip(0)",
    "labels": "self.inputs, self.targets + (order % 3 == 1)[:, None]",  # of one class
    "half": "self.inputs[order // 2 * 2], self.targets[order // 2 * 2]",
}
# Each rank adds other noise to the gradients, after DDP has averaged them.
GRADIENT_NOISE = """
@before(torch.optim.SGD, "step")
def add_noise(self):
    weight = self.param_groups[0]["params"][0]
    weight.grad += torch.randn_like(weight)
"""
SAME_GPU_STATE = "torch.cuda.get_rng_state = lambda: torch.zeros(16, dtype=torch.uint8)"
FAULTS = {
    "frozen": (FROZEN + at_step(25, CHANGE_FROZEN), r"step 30: scale differs on ranks \[2\]"),
    "noise": (GRADIENT_NOISE, r"step 1: net1.weight differs on ranks \[0, 1, 2\]"),
    "late": (at_step(25, LATE), r"step 30: late differs on ranks \[0, 1, 2\]"),
    "same shard": (SAME_SHARD, "epoch 0: 683 samples are on several ranks"),
    "own order": (OWN_ORDER, r"epoch 0: \d+ samples are on several ranks"),
    **{
        f"other {name}": (
            OWN_DATA.format(data=data),
            r"step 1: what the data set returns differs on ranks \[1\]",
        )
        for name, data in OTHER_DATA.items()
    },
    "GPU": (SAME_GPU_STATE, "step 1: random state of the GPU of rank 1 is also on rank 0"),
    "same seed": (SAME_SEED, "step 1: random state of rank 1 is also on rank 0"),
}


@pytest.mark.parametrize("ranks, named", [(3, [1]), (2, [0, 1])])  # of two, either may be wrong
def test_one_bit_of_one_weight(shell, ranks, named):
    """Found at the next comparison, such as an epoch's first; all ranks end."""
    step, every, found = (37, 10, 40) if ranks == 3 else (64, 1000, 65)
    options = f"4 --verify_every {every}"
    job = start(shell, "recipes/verify.py", options, at_step(step, FLIP_BIT), ranks)
    job.fails(f"step {found}: net2.weight differs on ranks {named}")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named(shell, fault):
    setup, line = FAULTS[fault]
    variables = pretend_gpus(3) if fault == "GPU" else {}
    job = start(shell, "recipes/verify.py", "4 --verify_every 10", setup, 3, **variables)
    job.fails()
    assert re.search(line, job.output), job.output


# Random augmentation, and a label that is a number.
NOISE = """
class Dataset(script.ToyDataset):
    def __getitem__(self, index):
        inputs, targets = super().__getitem__(index)
        return inputs + torch.rand(()), targets[0].item()
script.ToyDataset = Dataset
nn.MSELoss = lambda: lambda outputs, targets: (outputs - targets[:, None]).float().square().mean()
"""


def test_no_false_alarm(shell):
    """With dropout, augmentation and BatchNorm, whose statistics differ; it trains as the stage."""
    runs = [("plain", "multinode.py", ""), ("verified", "recipes/verify.py", "--verify_every 1")]
    for path, name, option in runs:
        options = f"2 {option} --batch_size 128 --snapshot_path {path}"
        start(shell, name, options, BATCH_NORM_AND_DROPOUT + NOISE, 3).succeeds()
    assert weights_diff(shell, "verified", "plain") == 0


INFINITE_WEIGHT = "self.model.module.net2.bias.data[0] = float('inf') if rank == 1 else 0"
NAN_SAMPLE = "inputs *= torch.nan if rank == 1 else 1"
NAN_GRADIENT = """
class Model(script.ToyModel):
    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs + (outputs - outputs.detach()).pow(2).sqrt()
script.ToyModel = Model
"""
NOT_FINITE = {
    "weight": (at_step(37, INFINITE_WEIGHT), "rank 1, step 37: output of net2 is not finite"),
    "sample": (at_step(37, NAN_SAMPLE), "rank 1, step 37: the batch is not finite"),
    "gradient": (NAN_GRADIENT, "RuntimeError: Function 'PowBackward0' returned nan values"),
}


@pytest.mark.parametrize("cause", NOT_FINITE)
def test_not_finite_is_traced(shell, cause):
    """The script of the page names step, rank and module; a gradient's forward has a traceback."""
    setup, line = NOT_FINITE[cause]
    script = patch(shell.folder, "multinode.py", setup)
    (code,) = fences("recipes/verify.md", "python")
    trace = shell.folder / "trace_nan.py"
    trace.write_text(code)
    job = shell.ranks(f"{trace} {script} 4", 2)
    assert job.wait() != 0
    assert line in job.output, job.output
