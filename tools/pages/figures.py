"""Draws who gets which sample, four collectives, and what FSDP gathers, as a trace shows it.

The order of FSDP's calls does not depend on the machine, so that a test can compare the pictures.
"""

import ranks
import torch
import torch.distributed as dist
from picture import Picture
from ranks import BLOCKS, FOLDER, RANKS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

CELL = 18


def draw_batches(picture, y, title, batches_of_ranks):
    """Draws the batches of each rank, a column per step."""
    picture.text(4, y, title)
    for step in range(len(batches_of_ranks[0])):
        picture.text(90 + 82 * step, y + 24, f"step {step + 1}", "")
    for rank, batches in enumerate(batches_of_ranks):
        top = y + 32 + 32 * rank
        picture.text(4, top + 17, f"rank {rank}")
        for step, batch in enumerate(batches):
            for place, sample in enumerate(batch):
                picture.box(57 + 82 * step + 34 * place, top, 30, 24, "ab"[rank], sample)


def draw_sampler(path):
    """Eight samples on two ranks, in batches of two, with DistributedSampler and without."""
    dataset = range(8)
    sharded, unsharded = [], []
    for rank in range(2):
        sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
        sharded.append([batch.tolist() for batch in DataLoader(dataset, 2, sampler=sampler)])
        torch.manual_seed(rank)
        unsharded.append([batch.tolist() for batch in DataLoader(dataset, 2, shuffle=True)])
    picture = Picture(400, 276, "The samples of two ranks, with and without DistributedSampler")
    picture.text(4, 21, "order")
    for place, sample in enumerate(DistributedSampler(dataset, num_replicas=1, rank=0)):
        look = "a" if any(sample in batch for batch in sharded[0]) else "b"
        picture.box(57 + 34 * place, 4, 30, 24, look, sample)
    draw_batches(picture, 56, "With DistributedSampler: 2 steps per epoch", sharded)
    draw_batches(picture, 182, "Without: 4 steps, and each rank takes all samples", unsharded)
    picture.save(path)


def collectives():
    """Returns, for each collective, what the ranks contribute and what they receive."""
    rows = [[10 * rank + place for place in range(RANKS)] for rank in range(RANKS)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    own = [[11 * rank] for rank in range(RANKS)]
    sums = [sum(column) for column in columns]
    return {
        "all-reduce": (rows, [sums] * RANKS),
        "all-gather": (own, [[value for (value,) in own]] * RANKS),
        "reduce-scatter": (rows, [[value] for value in sums]),
        "all-to-all": (rows, columns),
    }


def draw_collective(path, name, before, after):
    """Draws the tensors of each rank before and after; tens and colour say whose value it is."""
    picture = Picture(172, 132, name)
    picture.text(4, 15, name)
    picture.text(4, 37, "rank")
    for rank in range(RANKS):
        picture.text(4, 58 + 21 * rank, rank)
    for title, left, tensors in (("before", 14, before), ("after", 99, after)):
        picture.text(left + 72, 37, title, "end")
        for rank, values in enumerate(tensors):
            top = 44 + 21 * rank
            # A single value stands where it has its place in the whole tensor.
            for place, value in enumerate(values, rank if len(values) == 1 else 0):
                look = "abcd"[value // 10] if value < 10 * RANKS else ""
                picture.box(left + CELL * place, top, CELL, CELL, look, value)
    picture.path("M88 84h9m-5-4l5 4l-5 4")
    picture.save(path)


def trace_fsdp():
    """Returns what FSDP does with which block in a training step, in the CPU's order."""
    dist.init_process_group("gloo")
    model = ranks.load("fsdp").GPT(BLOCKS, n_head=1, n_embd=16, context=16, recompute=False)
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
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
    # A name is like "all_gather (blocks.0)".
    return [
        (kinds[kind], int(module[-2]))
        for kind, _, module in (name.partition(" (blocks.") for name in names)
        if module and kind in kinds
    ]


def draw_fsdp(path, steps):
    """Draws a row per block: when it is gathered, in use, and freed, in the order of `steps`."""
    picture = Picture(400, 208, "FSDP gathers and frees the blocks of a GPT in a training step")
    left, width = 57, 340 / len(steps)
    backward = steps.index(["free", BLOCKS - 1]) + 1  # it begins with the last block
    picture.text(left, 15, "forward")
    picture.text(left + backward * width, 15, "backward")
    looks = {"gather": "a dashed", "use": "a", "reduce": "b"}
    for block in range(BLOCKS):
        top = 24 + 30 * block
        picture.text(4, top + 16, f"block {block}")
        own = [(i, kind) for i, (kind, of) in enumerate(steps) if of == block]
        for (start, kind), (end, _) in zip(own, [*own[1:], (own[-1][0] + 1, "")], strict=True):
            if kind in looks:
                picture.box(left + start * width, top, (end - start) * width, 22, looks[kind])
    picture.path("M57 150h340m-5-4l5 4l-5 4")
    picture.text(left + 170, 168, "in the order of the calls", "")
    names = ("all-gather", "in use", "reduce-scatter")
    picture.legend(4, 192, dict(zip(looks.values(), names, strict=True)), across=130)
    picture.save(path)


if __name__ == "__main__":
    draw_sampler(FOLDER / "sampler.svg")
    for name, (before, after) in collectives().items():
        draw_collective(FOLDER / f"{name}.svg", name, before, after)
    draw_fsdp(FOLDER / "fsdp.svg", ranks.run(trace_fsdp)[0])
