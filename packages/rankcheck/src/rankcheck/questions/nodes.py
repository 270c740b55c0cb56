"""Asks what happens on several nodes, where LOCAL_RANK is 0 on more than one rank."""

import os

from rankcheck.questions.facts import Failure, ok, unseen, warning

MIN_STEPS = 3
# Without these words, a script has no number that is another one on several nodes.
LOCAL = ("local", "device_count")


def several(facts):
    """Whether it trains on several nodes as on one."""
    args, run = facts.args, facts.run
    single = args.no_kill and args.no_replay  # a single run is asked for
    if single or args.nodes > 1 or not facts.multi or facts.launcher != "torchrun":
        return
    has_local = any(word in facts.text.lower() for word in LOCAL)
    if facts.outside or not has_local or not (run.succeeded or run.limited):
        return
    on_nodes = run_on_nodes(facts)
    what = f"on {facts.ranks} nodes of one process each,"
    found = [*writers(facts, on_nodes, what)]
    if not (on_nodes.limited or on_nodes.succeeded):
        found.append(failure(on_nodes, what))
    elif not on_nodes.steps:
        found.append(unseen(f"whether it trains on several nodes: {what} it makes no step"))
    else:
        found += same_samples(facts, on_nodes, what)
    yield from found or [ok(f"{what} it trains as on one node")]


def run_on_nodes(facts):
    """Runs it until its first save, each rank on a node of its own."""
    saves = [e["at"] for e in facts.run.events if written_in(e) and e["at"]]
    steps = str(min(facts.args.steps, max([MIN_STEPS, *(at + 1 for at in saves[:1])])))
    options = {"nodes": facts.ranks, "AUDIT_STEPS": steps, "AUDIT_FIRST_ERROR": "1"}
    for gpus in (1, facts.ranks):  # a script may refuse to run on one
        run = facts.rerun("nodes", gpus=gpus, **options)
        if run.steps or run.hangs or "invalid device" in failure(run, "").text:
            break
    return run


def failure(run, what):
    events = sorted((e for e in run.events if "error" in e), key=lambda event: event["time"])
    failures = [Failure(event) for event in events]
    first = next((f for f in failures if not f.of_peer), failures[0] if failures else None)
    text = first.text if first else " ".join((run.hangs or "it makes no step").split())
    return warning("RC114", first and first.event, f"{what} it fails: {text}")


def same_samples(facts, on_nodes, what):
    """Looks for ranks that take the same samples, or train alone, there only."""
    by_run = [list(zip(*run.steps, strict=False)) for run in (facts.run, on_nodes)]
    alone, there = (all(is_same(ranks) for ranks in steps) for steps in by_run)
    if on_nodes.steps[0][0]["world_size"] < facts.first["world_size"]:
        text = "each trains alone: the size of the group is that of its node"
        yield warning("RC114", on_nodes.steps[0][0], f"{what} {text}")
    elif there and not alone and facts.replicas:
        place = facts.epochs[0][0] if facts.epochs else facts.first
        text = "all ranks train on the same samples: is LOCAL_RANK taken for the rank?"
        yield warning("RC114", place, f"{what} {text}")


def is_same(ranks):
    return bool(ranks[0]["samples"]) and len({str(step["samples"]) for step in ranks}) == 1


def written_in(event):
    """Returns the file that is saved, or made anew after the first step; no folder of dcp."""
    if "folder" in event:
        return ""
    return event.get("saved") or (event["at"] and event.get("opened"))


def writers_of(run):
    """Returns who writes which file: events of different ranks, by its path in the run's folder."""
    found = {}
    for events in run.processes:
        mine = {written_in(event): event for event in events if written_in(event)}
        for path, event in mine.items():
            found.setdefault(os.path.relpath(path, run.home), []).append(event)
    return found


def writers(facts, on_nodes, what):
    """Looks for files that one rank writes, and several there."""
    alone = writers_of(facts.run)
    for path, events in writers_of(on_nodes).items():
        if len(alone.get(path, [])) == 1 < len(events):
            text = f"{what} {len(events)} ranks write {os.path.basename(path)}: on a shared disk,"
            yield warning("RC402", events[0], f"{text} only rank 0 of all may")
