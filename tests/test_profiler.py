"""What recipes/profiler.py saves: a trace of three steps of rank 0; and weights as without it."""

import json
import re

import pytest
from helpers import run, snippet, weights_and_momentum

from tools.launch.snapshots import max_abs_diff


def events(trace):
    """Returns the events of a trace with a duration, in the order in which they began."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"])


def named(events, pattern):
    return [event for event in events if re.match(pattern, event["name"])]


def end(event):
    return event["ts"] + event["dur"]


def test_trace_of_three_steps(shell):
    """Only rank 0 writes, each phase is there once per step, and training is that of multinode.py.

    The ranks share no folder, so that it shows which of them writes.
    """
    folders = [shell.folder / "rank0", shell.folder / "rank1"]
    shell.ranks_on(folders, "multinode.py 2 1 --snapshot_path plain.pt").succeeds()
    output = shell.ranks_on(folders, "recipes/profiler.py 2 1 --snapshot_path p.pt").succeeds()
    assert output.count("saving the trace p.pt.trace.json\n") == 1
    assert [path.name for path in folders[0].glob("*trace*")] == ["p.pt.trace.json"]
    assert not list(folders[1].glob("p.pt*"))
    trace = folders[0] / "p.pt.trace.json"
    assert json.loads(trace.read_text())["distributedInfo"]["rank"] == 0
    found = events(trace)
    steps = named(found, "ProfilerStep")
    assert [step["name"] for step in steps] == [f"ProfilerStep#{n}" for n in (7, 8, 9)]
    phases = (
        r"enumerate\(DataLoader\)#.*__next__",
        r"DistributedDataParallel\.forward",
        r"MseLossBackward0",
        r"c10d::allreduce_",
        r"Optimizer\.step#SGD\.step",
    )
    for pattern in phases:
        starts = [event["ts"] for event in named(found, pattern)]
        assert len(starts) == 3, (pattern, starts)
        assert all(
            step["ts"] <= start <= end(step) for step, start in zip(steps, starts, strict=True)
        )
    # gloo's own thread ends an event after the step may have ended, so the last may be missing.
    assert 2 <= len(named(found, "gloo:all_reduce")) <= 3
    weights, momentum = weights_and_momentum(folders[0] / "plain.pt")
    result, result_momentum = weights_and_momentum(folders[0] / "p.pt")
    assert max_abs_diff(result, weights) == 0
    assert max_abs_diff(result_momentum, momentum) == 0


@pytest.mark.parametrize("steps, profiled", [(3, 0), (6, 0), (8, 1)])
def test_run_shorter_than_the_schedule(shell, steps, profiled):
    """An epoch is one step here. What is profiled by the end is saved; before that, nothing."""
    shell.ranks(f"recipes/profiler.py {steps} {steps} --batch_size 2048").succeeds()
    traces = list(shell.folder.glob("*.trace.json"))
    assert len(traces) == min(profiled, 1)
    for trace in traces:
        assert len(named(events(trace), r"Optimizer\.step#")) == profiled


def test_all_reduce_begins_during_backward(shell):
    """The page's command makes a model whose gradients fill two of DDP's buckets."""
    sed = snippet("recipes/profiler.md", "> wide.py", "sh").partition("torchrun")[0]
    sed = sed.replace("> wide.py", f"> {shell.folder}/wide.py")
    assert run("sh", "-c", sed).returncode == 0
    shell.ranks(f"{shell.folder}/wide.py 1 1 --snapshot_path wide.pt", 2).succeeds()
    found = events(shell.folder / "wide.pt.trace.json")
    steps = named(found, "ProfilerStep")
    assert len(steps) == 3
    for step in steps:
        inside = [event for event in found if step["ts"] <= event["ts"] < end(step)]
        all_reduces = named(inside, "c10d::allreduce_")
        backward = named(inside, "autograd::engine::evaluate_function")
        assert len(all_reduces) == 2
        assert backward[0]["ts"] < all_reduces[0]["ts"] < backward[-1]["ts"]
