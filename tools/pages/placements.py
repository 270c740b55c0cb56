"""Draws what each rank holds of the GPT, of four or eight, for each way to split it: placements.py

Each script trains for one step. After it, every rank tells which part it has of each matrix, of its
gradient and of its optimizer state, and which samples and times each of its blocks has seen.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tools.pages import ranks
from tools.pages.picture import Picture, assets_folder
from tools.pages.ranks import BATCH_SIZE, BLOCKS, CONTEXT, RANKS

SCRIPTS = {
    "pretrain": "",
    "fsdp": "",
    "hsdp": "--shard_size 2",
    "tensor_parallel": f"--tp_size {RANKS}",
    "pipeline_parallel": f"--pp_size {RANKS} --micro_batches 4",
    "context_parallel": "--cp_size 2",
    "three_d": "--pp_size 2 --tp_size 2 --micro_batches 4 --batch_size 4",
}
ROWS = {"qkv": 0, "proj": 1, "up": 2, "down": 3, "activations": 4.6}
SIZE, PITCH = 16, 19  # of a square
HEIGHT = 136  # of a row of ranks


def part(tensor):
    """Returns the part of a whole matrix that this rank has: top, left, bottom, right, 0 to 1."""
    if not isinstance(tensor, DTensor):
        return [0, 0, 1, 1]
    rows, columns = tensor.shape
    numbers = torch.arange(rows * columns).view(rows, columns)
    held = ranks.shard_like(tensor, numbers)
    top, left = divmod(held[0, 0].item(), columns)
    last_row, last_column = divmod(held[-1, -1].item(), columns)
    return [top / rows, left / columns, (last_row + 1) / rows, (last_column + 1) / columns]


def held_parts(name):
    """Trains one step on this rank; returns what it holds, by block and row of the picture."""
    script = ranks.load(name)
    times = {}  # how many of the context each block has seen
    held = {}
    forward = script.Block.forward

    def forward_and_record(self, x):
        times[self] = x.shape[1]
        return forward(self, x)

    def record(self):
        model = getattr(self.model, "module", self.model)
        for weight_name, weight in model.named_parameters():
            if weight.dim() == 2 and weight_name.startswith("blocks."):
                held[weight_name.removeprefix("blocks.").removesuffix(".weight")] = part(weight)
                state = self.optimizer.state[weight]["exp_avg"]
                assert part(weight.grad) == part(state) == part(weight)
        for number, block in model.blocks.named_children():
            held[f"{number}.activations"] = activations(self.train_loader.sampler, times[block])

    script.Block.forward = forward_and_record
    script.Trainer._save_snapshot = record
    ranks.train(script, 1, f"--batch_size {BATCH_SIZE} {SCRIPTS[name]}")
    return held


def activations(sampler, time):
    """Returns the part of all samples (down) and of the time (right) that a block has seen."""
    parts_of_time = CONTEXT // time
    left = dist.get_rank() % parts_of_time / parts_of_time
    top = sampler.rank / sampler.num_replicas
    return [top, left, top + 1 / sampler.num_replicas, left + 1 / parts_of_time]


def draw(name, held_by_ranks, path):
    rows_of_ranks = len(held_by_ranks) // RANKS
    number = {1: "four", 2: "eight"}[rows_of_ranks]
    title = f"What each of {number} ranks holds with {name}.py"
    picture = Picture(400, HEIGHT * rows_of_ranks, title)
    for rank, held in enumerate(held_by_ranks):
        row_of_ranks, column = divmod(rank, RANKS)
        above, left = HEIGHT * row_of_ranks, 80 + 82 * column
        if column == 0:
            for row, place in ROWS.items():
                picture.text(4, above + 37 + PITCH * place, row)
        picture.text(left + 2 * PITCH - 1.5, above + 15, f"rank {rank}", "")
        for block in range(BLOCKS):
            for row, place in ROWS.items():
                x, y = left + PITCH * block, above + 24 + PITCH * place
                picture.box(x, y, SIZE, SIZE)
                if where := held.get(f"{block}.{row}"):
                    top, first, bottom, last = (SIZE * edge for edge in where)
                    look = f"{'abcd'[column]} solid"
                    picture.box(x + first, y + top, last - first, bottom - top, look)
    picture.save(path)


if __name__ == "__main__":
    for name in SCRIPTS:
        world_size = 8 if name == "three_d" else RANKS
        held_by_ranks = ranks.run(held_parts, name, world_size=world_size)
        draw(name, held_by_ranks, assets_folder() / f"holds_{name}.svg")
