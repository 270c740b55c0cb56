"""Draws which experts each of four ranks holds and computes, and for whose tokens: experts.py

Each script trains for one step; the picture shows the first block.
"""

import torch
from torch.distributed.tensor import DTensor

from tools.pages import ranks
from tools.pages.picture import Picture, assets_folder
from tools.pages.ranks import BATCH_SIZE, RANKS

SCRIPTS = ("moe", "expert_parallel")
EXPERTS = 8
SIZE, PITCH = 8, 9  # of a square
ROW = 11  # from one row to the next
ROWS = {"holds": 0, "computes with": 1.5, "tokens": 3}


def experts_of_this_rank(name):
    """Trains one step on this rank; returns what its first block holds and computes."""
    script = ranks.load(name)
    found = {}
    run_experts = script.MixtureOfExperts._run_experts

    def run_and_record(self, inputs, expert_ids):
        weights = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        rows = expert_ids.bincount(minlength=len(weights)).tolist()
        found.setdefault("rows", rows)
        return run_experts(self, inputs, expert_ids)

    def record(self):
        layer = self.model.blocks[0].moe
        found["holds"] = ranks.shard_like(layer.up, torch.arange(EXPERTS)).tolist()
        found["load"] = layer.load.tolist()

    script.MixtureOfExperts._run_experts = run_and_record
    script.Trainer._save_snapshot = record
    ranks.train(script, 1, f"--batch_size {BATCH_SIZE // RANKS} --n_experts {EXPERTS} --top_k 2")
    return found


def draw(name, found_by_ranks, path):
    loads = [found["load"] for found in found_by_ranks]  # by rank and expert
    scale = SIZE / max(map(max, loads))
    picture = Picture(400, 104, f"Experts that four ranks hold and compute with in {name}.py")
    for text, place in ROWS.items():
        picture.text(4, 33 + ROW * place, text, "start small")
    for source in range(RANKS):
        picture.text(46, 33 + ROW * (3 + source), f"of rank {source}", "start small")
    for rank, found in enumerate(found_by_ranks):
        left = 96 + 77 * rank
        color = "abcd"[rank]
        picture.text(left + 4 * PITCH, 15, f"rank {rank}", "")
        gathered = len(found["rows"]) == EXPERTS
        computes = range(EXPERTS) if gathered else found["holds"]
        sources = [rank] if gathered else range(RANKS)
        rows = [sum(loads[source][expert] for source in sources) for expert in computes]
        assert rows == found["rows"]
        for expert in range(EXPERTS):
            x = left + PITCH * expert
            for row, experts in (("holds", found["holds"]), ("computes with", computes)):
                look = f"{color} solid" if expert in experts else ""
                picture.box(x, 25 + ROW * ROWS[row], SIZE, SIZE, look)
            for source in range(RANKS):
                y = 25 + ROW * (ROWS["tokens"] + source)
                picture.box(x, y, SIZE, SIZE)
                if expert in computes and source in sources:
                    height = scale * loads[source][expert]
                    picture.box(x, y + SIZE - height, SIZE, height, f"{color} solid")
    picture.save(path)


if __name__ == "__main__":
    for name in SCRIPTS:
        draw(name, ranks.run(experts_of_this_rank, name), assets_folder() / f"experts_{name}.svg")
