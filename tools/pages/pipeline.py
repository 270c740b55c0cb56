"""Draws the schedules of pipeline parallelism, GPipe and 1F1B, from a run of each.

gpt/pipeline_parallel.py trains on four ranks, where every forward pass takes 20 ms and every
backward pass 40 ms: ranks on two cores would otherwise wait for each other's computation. Prints
the share of the time in which the ranks are idle.
"""

import time

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from tools.pages import ranks
from tools.pages.picture import Picture, Scale
from tools.pages.ranks import FOLDER, RANKS

MICRO_BATCHES = 8
SECONDS = {"forward": 0.02, "backward": 0.04}
LOOKS = {"forward": "a", "backward": "b"}


def record(schedule):
    """Trains three steps on this rank; returns when the passes of the last began and ended."""
    script = ranks.load("pipeline_parallel")
    if schedule == "GPipe":
        script.Schedule1F1B = ScheduleGPipe
    passes = []
    for kind in SECONDS:
        stretch(kind, passes)
    run_batch = script.Trainer._run_batch

    def run_batch_from_now(self, inputs, targets):
        dist.barrier()
        passes.clear()
        return run_batch(self, inputs, targets)

    script.Trainer._run_batch = run_batch_from_now
    options = f"--pp_size {RANKS} --micro_batches {MICRO_BATCHES}"
    ranks.train(script, 3, f"--batch_size {ranks.BATCH_SIZE} {options}")
    return passes


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


def idle_share(passes_of_ranks):
    passes = [one_pass for passes in passes_of_ranks for one_pass in passes]
    busy = sum(end - start for *_, start, end in passes)
    whole = max(end for *_, end in passes) - min(start for *_, start, _ in passes)
    return 1 - busy / (whole * len(passes_of_ranks))


def draw(runs, path):
    picture = Picture(400, 302, "Which rank computes which micro-batch when, with GPipe and 1F1B")
    starts = {name: min(passes[0][2] for passes in run) for name, run in runs.items()}
    longest = max(run[0][-1][3] - starts[name] for name, run in runs.items())
    seconds_x = Scale(0, longest, 52, 384)
    for row, (name, run) in enumerate(runs.items()):
        top = 24 + 120 * row
        picture.text(52, top - 9, name)
        for rank, passes in enumerate(run):
            draw_passes(picture, top + 23 * rank, rank, passes, starts[name], seconds_x)
    marks = {ms / 1000: ms for ms in range(0, int(1000 * longest), 100)}
    picture.x_axis(seconds_x, 240, marks, "milliseconds")
    picture.legend(52, 290, {"a": "forward", "b": "backward"}, across=90)
    picture.save(path)


def draw_passes(picture, top, rank, passes, origin, seconds_x):
    picture.text(4, top + 14.5, f"rank {rank}")
    centers = []
    for kind, _, start, end in passes:
        left, right = seconds_x(start - origin), seconds_x(end - origin)
        picture.box(left, top, right - left, 20, LOOKS[kind])
        centers.append((left + right) / 2)
    numbers = "".join(str(micro_batch) for _, micro_batch, *_ in passes)
    picture.text(centers, top + 13.5, numbers, "small")


if __name__ == "__main__":
    runs = {schedule: ranks.run(record, schedule) for schedule in ("GPipe", "1F1B")}
    formula = (RANKS - 1) / (MICRO_BATCHES + RANKS - 1)
    for name, run in runs.items():
        print(f"{name}: idle {idle_share(run):.1%} of the time, by the formula {formula:.1%}")
    draw(runs, FOLDER / "pipeline_schedules.svg")
