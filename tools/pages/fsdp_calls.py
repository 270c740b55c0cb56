"""Draws what FSDP gathers and frees in a training step, as a trace on four ranks shows it.

The order of its calls does not depend on the machine, so that a test can compare the picture.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from by_hand import fsdp
from tools.pages import ranks
from tools.pages.picture import Picture, assets_folder
from tools.pages.ranks import BLOCKS, RANKS

BLOCK_UNITS = [f"blocks.{number}" for number in range(BLOCKS)]
EMBEDDINGS, HEAD = "embeddings", "norm, head"


def trace():
    """Returns what FSDP does with which unit in a training step, in the CPU's order."""
    dist.init_process_group("gloo")
    config = SimpleNamespace(n_layer=BLOCKS, n_head=1, n_embd=16, context=16, recompute=False)
    model = ranks.load("fsdp").GPT(config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        model(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    calls = sorted(prof.events(), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("FSDP::") for event in calls if "FSDP::" in event.name]
    kinds = {
        "all_gather": "gather",
        "all_gather_copy_out": "use",
        "post_forward": "free",
        "post_backward_reshard": "free",
        "post_backward_reduce": "reduce",
    }
    # A name is like "all_gather (blocks.0)"; that of the root, which has the rest, has no module.
    found = [name.rstrip(")").partition(" (") for name in names]
    return [
        (kinds[kind], unit or EMBEDDINGS)
        for kind, _, unit in found
        # Only blocks are freed after their forward pass.
        if kind in kinds and (kind != "post_forward" or unit.startswith("blocks."))
    ]


def trace_by_hand():
    """Returns the same of by_hand/fsdp.py and the blocks alone."""
    dist.init_process_group("gloo")
    calls = []
    units = iter(BLOCK_UNITS)

    class RecordedBucket(fsdp.Bucket):
        def __init__(self, layer):
            self.unit = next(units)
            super().__init__(layer)

        def gather_weights(self, *args):
            calls.append(("gather", self.unit))
            super().gather_weights(*args)
            calls.append(("use", self.unit))

        def free_weights(self):
            super().free_weights()
            calls.append(("free", self.unit))

        def note_gradient(self, parameter):
            if self.ready + 1 == len(self.parameters):
                calls.append(("reduce", self.unit))
            super().note_gradient(parameter)

    fsdp.Bucket = RecordedBucket
    config = SimpleNamespace(n_head=1, n_embd=16)
    blocks = [ranks.load("fsdp").Block(config) for _ in range(BLOCKS)]
    model = fsdp.FullyShardedDataParallel(nn.Sequential(*blocks))
    calls.clear()
    model(torch.zeros(1, 16, 16)).sum().backward()
    return calls


def draw(path, steps, units, end_of_forward):
    """Draws a row per unit: when it is gathered, in use, and freed, in the order of `steps`."""
    bottom = 30 + 30 * len(units)
    title = "FSDP gathers and frees the parts of a GPT in a training step"
    picture = Picture(400, bottom + 58, title)
    left, width = 90, 307 / len(steps)
    backward = steps.index(end_of_forward) + 1
    picture.text(left, 15, "forward")
    picture.text(left + backward * width, 15, "backward")
    looks = {"gather": "a dashed", "use": "a", "reduce": "b"}
    for row, unit in enumerate(units):
        top = 24 + 30 * row
        picture.text(4, top + 16, unit.replace("blocks.", "block "))
        own = [(i, kind) for i, (kind, of) in enumerate(steps) if of == unit]
        for (start, kind), (end, _) in zip(own, [*own[1:], (own[-1][0] + 1, "")], strict=True):
            if kind in looks:
                picture.box(left + start * width, top, (end - start) * width, 22, looks[kind])
    picture.path(f"M{left} {bottom}h307m-5-4l5 4l-5 4")
    picture.text(left + 153, bottom + 18, "in the order of the calls", "")
    names = ("all-gather", "in use", "reduce-scatter")
    picture.legend(4, bottom + 42, dict(zip(looks.values(), names, strict=True)), across=130)
    picture.save(path)


if __name__ == "__main__":
    units = [EMBEDDINGS, *BLOCK_UNITS, HEAD]
    draw(assets_folder() / "fsdp.svg", ranks.run(trace)[0], units, ["use", HEAD])  # which is kept
    steps = ranks.run(trace_by_hand)[0]
    draw(assets_folder() / "by_hand_fsdp.svg", steps, BLOCK_UNITS, ["free", BLOCK_UNITS[-1]])
