"""Draws the schedules of pipeline parallelism, GPipe and 1F1B, from a run of each: pipeline.py

gpt/pipeline_parallel.py trains on four ranks. Each forward pass is stretched to 20 ms and each
backward pass to 40 ms by sleeping: four devices do not wait for each other's computation, as four
ranks on two cores would. Prints the share of the time in which the ranks are idle.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RANKS, MICRO_BATCHES = 4, 8
SECONDS = {"forward": 0.02, "backward": 0.04}
# Legible on light and on dark pages.
GREY = "#6e7781"
LOOKS = {"forward": ("#1158c7", "white"), "backward": ("#d4a72c", "black")}  # and the number's


def record(schedule, folder):
    """Trains three steps on this rank, and writes when the passes of the last began and ended."""
    import gpt.pipeline_parallel as script

    if schedule == "GPipe":
        script.Schedule1F1B = ScheduleGPipe
    passes = []
    for kind in SECONDS:
        stretch(kind, passes)
    run_batch = script.Trainer._run_batch

    def run_batch_from_now(self, inputs, targets):
        dist.barrier()
        passes.clear()
        run_batch(self, inputs, targets)

    script.Trainer._run_batch = run_batch_from_now
    model = "--n_layer 4 --n_head 1 --n_embd 16 --context 16 --batch_size 8 --text text"
    options = f"--pp_size {RANKS} --micro_batches {MICRO_BATCHES} --snapshot_path {schedule}"
    os.chdir(folder)
    sys.argv = ["pipeline_parallel.py", "1", *model.split(), *options.split()]
    script.Trainer._evaluate = lambda self: None
    script.main(script.parse_args())
    Path(f"{schedule}-{os.environ['RANK']}.json").write_text(json.dumps(passes))


def stretch(kind, passes):
    """Makes a pass of a stage take as long as `SECONDS` says, and append itself to `passes`."""
    method = getattr(PipelineStage, f"{kind}_one_chunk")

    def run(self, micro_batch, *args, **options):
        start = time.time()
        result = method(self, micro_batch, *args, **options)
        time.sleep(max(0, start + SECONDS[kind] - time.time()))
        passes.append((kind, micro_batch, start, time.time()))
        return result

    setattr(PipelineStage, f"{kind}_one_chunk", run)


def run(schedule, folder):
    """Returns the passes of each rank in a training step."""
    random_text = random.Random(0).randbytes((1024 + 3 * MICRO_BATCHES) * 16 + 1)
    Path(folder, "text").write_bytes(random_text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = ["torchrun", "--standalone", f"--nproc_per_node={RANKS}", __file__]
    subprocess.run(
        [*command, "--schedule", schedule, folder], check=True, env=environment, stdout=sys.stderr
    )
    return [json.loads(Path(folder, f"{schedule}-{r}.json").read_text()) for r in range(RANKS)]


def idle_share(ranks):
    passes = [one_pass for rank in ranks for one_pass in rank]
    busy = sum(end - start for *_, start, end in passes)
    whole = max(end for *_, end in passes) - min(start for *_, start, _ in passes)
    return 1 - busy / (whole * len(ranks))


def draw(runs, path):
    colors = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = dict.fromkeys(colors, GREY) | {"font.size": 12}
    style |= {"svg.hashsalt": "", "svg.fonttype": "none"}  # the same file each time, text as text
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
        for axes, (schedule, ranks) in zip(figure.subplots(len(runs)), runs.items(), strict=True):
            origin = min(start for rank in ranks for *_, start, _ in rank)
            for rank, passes in enumerate(ranks):
                for kind, micro_batch, start, end in passes:
                    left, width = 1000 * (start - origin), 1000 * (end - start)
                    color, text_color = LOOKS[kind]
                    axes.barh(rank, width, left=left, color=color, edgecolor="white")
                    center = {"ha": "center", "va": "center", "fontsize": 9, "color": text_color}
                    axes.text(left + width / 2, rank, micro_batch, **center)
            axes.invert_yaxis()
            axes.set(ylabel="rank", yticks=range(len(ranks)), title=schedule)
        axes.set_xlabel("milliseconds; blue: forward, yellow: backward")
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--svg", default="runs/pipeline.svg", help="where to draw")
    parser.add_argument("--schedule", choices=("GPipe", "1F1B"), help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.schedule:
        return record(args.schedule, args.folder)
    with tempfile.TemporaryDirectory() as folder:
        runs = {schedule: run(schedule, folder) for schedule in ("GPipe", "1F1B")}
    formula = (RANKS - 1) / (MICRO_BATCHES + RANKS - 1)
    for schedule, ranks in runs.items():
        print(f"{schedule}: idle {idle_share(ranks):.1%} of the time, by the formula {formula:.1%}")
    Path(args.svg).parent.mkdir(exist_ok=True)
    draw(runs, args.svg)


if __name__ == "__main__":
    main()
