"""recipes/stream.py: killed, and resumed on another number of ranks, it trains each line once."""

import json
from itertools import chain

import pytest
import torch
from helpers import (
    FORK,
    LONG,
    SIGNAL,
    documented_error,
    first,
    patch,
    position,
    weights_and_momentum,
)

import singlegpu
from tools.launch.snapshots import max_abs_diff

SCRIPT = "recipes/stream.py"
SIZES = [7, 0, 130, 64, 56]  # lines of the shards: of five global batches, the last has but one
LIVES = [(1, 2, (0, 192)), (3, 0, (1, 256)), (2, 2, (3, 0))]  # ranks, data workers, where it ends
# Writes which samples, as they reach the model, count in the gradients of a step.
RECORD = f"""{FORK}{SIGNAL}
# As many lines as `SIZES` has, where the script generates them.
script.range = lambda *bounds: range(257) if bounds == (2048,) else range(*bounds)
script.SHUFFLE_SIZE = 100
glob = script.Path.glob  # which a disk answers in an order of its own
script.Path.glob = lambda *args: sorted(glob(*args), reverse=os.environ["RANK"] == "1")
@before(script.Trainer, "_run_batch")
def record(self, inputs, targets):
    def write(grad):
        with open(f"{{self.args.snapshot_path}}.{{os.getpid()}}", "a") as file:
            print(script.json.dumps(inputs[grad.any(1)].tolist()), file=file)
    targets.requires_grad_().register_hook(write)
"""


@pytest.mark.parametrize(
    ("source", "dtype", "tolerance"),
    first(1, [("", torch.float32, 1e-6), ("--shards .", torch.float64, 1e-12)], LONG),
)
def test_each_line_once(shell, source, dtype, tolerance):
    """As in an unbroken run of one process, and in a plain loop over the batches of that."""
    torch.set_default_dtype(dtype)
    samples = torch.randn(sum(SIZES), 10)
    for number, shard in enumerate(samples.split(SIZES)):
        lines = "".join(f"{sample}\n" for sample in shard.tolist())
        (shell.folder / f"{number}.jsonl").write_text(lines)
    setup = f"{RECORD}torch.set_default_dtype({dtype})"
    command = f"{patch(shell.folder, SCRIPT, setup)} 3 9 {source} --save_every_steps 1"
    for ranks, workers, end in LIVES:
        kill = {"SIGNAL": "9", "SIGNAL_AT": "{} {}".format(*end)}
        job = shell.ranks(f"{command} --num_workers {workers}", ranks, **kill)
        assert job.wait() == (-9 if end < (3, 0) else 0), job.output
        assert position(shell.folder / "snapshot.pt") == end
    shell.ranks(f"{command} --snapshot_path unbroken").succeeds()
    killed, unbroken = (
        [json.loads(line) for path in shell.folder.glob(f"{run}.*") for line in path.open()]
        for run in ("snapshot.pt", "unbroken")
    )
    assert sorted(chain(*killed)) == sorted(chain(*unbroken))
    if source:
        assert sorted(chain(*unbroken)) == sorted(3 * samples.tolist())
        orders = [[s for s in chain(*unbroken[n : n + 5]) if s in shard.tolist()] for n in (0, 5)]
        assert shard.tolist() != orders[0] != orders[1] != shard.tolist()
    torch.manual_seed(0)
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for inputs in map(torch.tensor, unbroken):
        optimizer.zero_grad()
        ((model(inputs) - inputs[:, :5] + inputs[:, 5:]) ** 2).mean().backward()
        optimizer.step()
    for name in ("snapshot.pt", "unbroken"):
        weights, _ = weights_and_momentum(shell.folder / name)
        assert max_abs_diff(weights, model.parameters()) < tolerance


def test_other_shards_within_an_epoch(shell):
    """They are refused. If they have no line, it says so."""
    error = documented_error("there is no batch to train with: is the data set empty?")
    command = f"{patch(shell.folder, SCRIPT, SIGNAL)} 1 --shards . --save_every_steps 1"
    shell.ranks(command).fails(error)

    def write_shards(*names):
        for name, lines in zip(names, (99, 100), strict=True):
            (shell.folder / f"{name}.jsonl").write_text(f"{[0.5] * 10}\n" * lines)

    write_shards("a", "b")
    assert shell.ranks(command, SIGNAL="9", SIGNAL_AT="0 64").wait() == -9
    write_shards("b", "a")  # they exchange their names
    shell.ranks(command).fails("its epoch has seed 0, 2 shards ", ", not seed 0, 2 shards ")
    write_shards("a", "b")
    assert "0 of 1 epochs done" in shell.ranks(command).succeeds()
