"""Draws who gets which sample, four collectives, and what FSDP gathers, as they really happen.

Their orders and values do not depend on the machine, so that a test can compare the pictures.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

from tools.pages import ranks
from tools.pages.picture import Picture
from tools.pages.ranks import BLOCKS, FOLDER, RANKS

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


def run_collectives():
    """Returns, for each collective, what this rank contributes and what it receives."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ours = torch.arange(RANKS) + 10 * rank
    summed, gathered, exchanged = ours.clone(), torch.empty_like(ours), torch.empty_like(ours)
    part_of_sum = torch.empty_like(ours[:1])
    dist.all_reduce(summed)
    dist.all_gather_single(gathered, ours[rank : rank + 1])
    dist.reduce_scatter_single(part_of_sum, ours)
    dist.all_to_all_single(exchanged, ours)
    return {
        "all-reduce": [ours.tolist(), summed.tolist()],
        "all-gather": [ours[rank : rank + 1].tolist(), gathered.tolist()],
        "reduce-scatter": [ours.tolist(), part_of_sum.tolist()],
        "all-to-all": [ours.tolist(), exchanged.tolist()],
    }


def draw_collective(path, name, tensors_of_ranks):
    """Draws the tensors of each rank before and after; tens and colour say whose value it is."""
    picture = Picture(172, 132, name)
    picture.text(4, 15, name)
    picture.text(4, 37, "rank")
    for side, left in ((0, 14), (1, 99)):
        picture.text(left + 72, 37, ("before", "after")[side], "end")
        for rank, tensors in enumerate(tensors_of_ranks):
            top = 44 + 21 * rank
            picture.text(4, top + 14, rank)
            for place, value in enumerate(tensors[side]):
                # A single value stands where it has its place in the whole tensor.
                column = place if len(tensors[side]) > 1 else rank
                look = "abcd"[value // 10] if value < 10 * RANKS else ""
                picture.box(left + CELL * column, top, CELL, CELL, look, value)
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
    collectives = ranks.run(run_collectives)
    for name in collectives[0]:
        draw_collective(FOLDER / f"{name}.svg", name, [tensors[name] for tensors in collectives])
    draw_fsdp(FOLDER / "fsdp.svg", ranks.run(trace_fsdp)[0])
