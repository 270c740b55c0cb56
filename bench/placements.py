"""Draws what each of four ranks holds of the GPT, for each way to split it: placements.py

Each script trains for one step. After it, every rank tells which part it has of each matrix, of its
gradient and of its optimizer state, and which samples and times each of its blocks has seen.
"""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch.distributed.tensor import DTensor, distribute_tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RANKS, BLOCKS, CONTEXT, BATCH_SIZE = 4, 4, 16, 8  # of all ranks together
SCRIPTS = {
    "pretrain": "",
    "fsdp": "",
    "hsdp": "--shard_size 2",
    "tensor_parallel": f"--tp_size {RANKS}",
    "pipeline_parallel": f"--pp_size {RANKS} --micro_batches 4",
    "context_parallel": "",
}
ALL_RANKS_SHARE_A_BATCH = ("tensor_parallel", "pipeline_parallel", "context_parallel")
# Legible on light and on dark pages; a colour a rank.
GREY, COLORS = "#6e7781", ["#2f81f7", "#d4a72c", "#2da44e", "#bf5af2"]
MATRICES = ["qkv", "proj", "up", "down"]


def part(tensor):
    """Returns the part of a whole matrix that this rank has: top, left, bottom, right, 0 to 1."""
    if not isinstance(tensor, DTensor):
        return [0, 0, 1, 1]
    rows, columns = tensor.shape
    numbers = torch.arange(rows * columns).view(rows, columns)
    mesh, placements = tensor.device_mesh, tensor.placements
    held = distribute_tensor(numbers, mesh, placements, src_data_rank=None).to_local()
    top, left = divmod(held[0, 0].item(), columns)
    last_row, last_column = divmod(held[-1, -1].item(), columns)
    return [top / rows, left / columns, (last_row + 1) / rows, (last_column + 1) / columns]


def record(name, folder):
    """Trains one step on this rank, and writes what it holds."""
    script = importlib.import_module(f"gpt.{name}")
    rank = int(os.environ["RANK"])
    seen = {}
    forward = script.Block.forward

    def forward_and_record(self, x):
        seen[self] = x.shape[1]
        return forward(self, x)

    script.Block.forward = forward_and_record

    def write(self):
        model = getattr(self.model, "module", self.model)
        weights = {}
        for matrix_name, weight in model.named_parameters():
            if weight.dim() == 2:
                weights[matrix_name.removesuffix(".weight")] = part(weight)
                state = self.optimizer.state[weight]["exp_avg"]
                assert part(weight.grad) == part(state) == part(weight)
        times = {number: seen[block] for number, block in model.blocks.named_children()}
        Path(f"{name}-{rank}.json").write_text(json.dumps({"weights": weights, "times": times}))

    script.Trainer._evaluate = lambda self: None
    script.Trainer._save_snapshot = write
    if hasattr(script.GPT, "generate"):
        script.GPT.generate = lambda self, prompt, max_new_tokens: ""
    os.chdir(folder)
    batch_size = BATCH_SIZE // (1 if name in ALL_RANKS_SHARE_A_BATCH else RANKS)
    model = f"--n_layer {BLOCKS} --n_head 4 --n_embd 16 --context {CONTEXT}"
    options = f"--batch_size {batch_size} --text text --snapshot_path {name} {SCRIPTS[name]}"
    sys.argv = [f"{name}.py", "1", *model.split(), *options.split()]
    script.main(script.parse_args())


def run(name, folder):
    """Returns what each rank holds."""
    text = random.Random(0).randbytes((1024 + BATCH_SIZE) * CONTEXT + 1)
    Path(folder, "text").write_bytes(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ["torchrun", "--standalone", f"--nproc_per_node={RANKS}", __file__]
    subprocess.run(
        [*command, "--script", name, folder], check=True, env=environment, stdout=sys.stderr
    )
    return [json.loads(Path(folder, f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]


def draw_matrix(axes, x, y, size, held, color):
    """Draws the outline of a whole, and fills the part that is held: (top, left, bottom, right)."""
    axes.add_patch(matplotlib.patches.Rectangle((x, y), size, size, fill=False, ec=GREY, lw=0.6))
    if held:
        top, left, bottom, right = held
        corner = (x + left * size, y + top * size)
        width, height = (right - left) * size, (bottom - top) * size
        axes.add_patch(matplotlib.patches.Rectangle(corner, width, height, color=color, lw=0))


def held_activations(name, rank, time):
    """Returns the part of all samples (down) and of the time (right) that a block has seen."""
    if time is None:
        return None
    parts_of_time = CONTEXT // time
    left = rank % parts_of_time / parts_of_time
    top, bottom = (0, 1) if name in ALL_RANKS_SHARE_A_BATCH else (rank / RANKS, (rank + 1) / RANKS)
    return [top, left, bottom, left + 1 / parts_of_time]


def draw(name, ranks, path):
    style = {"font.size": 12, "text.color": GREY, "svg.hashsalt": "", "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 2.3), layout="constrained")
        for rank, axes in enumerate(figure.subplots(1, RANKS)):
            held = ranks[rank]
            for block in range(BLOCKS):
                for row, matrix in enumerate(MATRICES):
                    where = held["weights"].get(f"blocks.{block}.{matrix}")
                    draw_matrix(axes, 1.2 * block, 1.2 * row, 1, where, COLORS[rank])
                where = held_activations(name, rank, held["times"].get(str(block)))
                draw_matrix(axes, 1.2 * block, 6.4, 1, where, COLORS[rank])
            axes.set(xlim=(-0.2, 1.2 * BLOCKS), ylim=(7.6, -0.2), aspect="equal")
            axes.set_title(f"rank {rank}", fontsize=12)
            axes.axis("off")
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where to draw")
    parser.add_argument("--script", choices=SCRIPTS, help=argparse.SUPPRESS)
    parser.add_argument("work_folder", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.script:
        return record(args.script, args.work_folder)
    args.folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in SCRIPTS:
            draw(name, run(name, folder), args.folder / f"holds_{name}.svg")


if __name__ == "__main__":
    main()
