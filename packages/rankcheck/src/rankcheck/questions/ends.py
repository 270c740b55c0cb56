"""Asks how a run ends, and what each rank does."""

import re
from itertools import zip_longest

from rankcheck.launch.run import rank_of
from rankcheck.questions.facts import error, ok, one_line, unseen, warning

# Words of errors that a real GPU or a network would not bring.
MISSING_HERE = r"cuda|network|connect|resolve|gaierror|urlopen|HTTP|Max retries|offline"


def why_not(facts):
    """Returns what a script says that makes no step."""
    if refused := facts.events("cannot_run"):
        return refused[0]["cannot_run"]
    said = [f"{(f.event or {'place': ''})['place']}: {f.text}" for f in facts.failures[:1]]
    return "\n".join([*said, *facts.run.lines()[-12:]]) or "It printed nothing."


def too_early(facts):
    """Whether the limit ends the run before each rank has made a step."""
    joined = max((event["joined"] for event in facts.events("joined")), default=1)
    return facts.run.limited and facts.ranks < joined


def end(facts):
    """Whether it ends, and how."""
    run = facts.run
    if facts.events("ddp_for_fsdp"):
        yield unseen("what FSDP does: the framework has it for GPUs only, so DDP takes its place")
    if run.hangs:
        hangs = one_line(run.hangs)
        calls = different_calls(run)
        hangs += f" Of their collectives, the first that differ: {calls}." if calls else ""
        say = error if run.is_deadlock else warning
        yield unseen(hangs) if run.is_long else say("RC101", None, hangs)
    elif run.limited:
        yield unseen("how it ends: --steps or --seconds ended it first")
    elif any(run.statuses):
        yield failure(facts)
    else:
        yield ok("it ends, with status 0")
        if run.stay_in_group() and not facts.events("framework"):
            yield warning("RC105", None, "destroy_process_group is not called")


def caught(facts):
    """Whether it exits with another status than 0 after an error."""
    # What catches all, or may start ranks whose status nobody reads.
    catches_all = re.search(r"(?m)^\s*except( (Base)?Exception( as \w+)?)?:|Process\(", facts.text)
    if facts.args.no_kill or facts.outside or not catches_all:
        return
    run = facts.rerun("raised", AUDIT_RAISE="1", AUDIT_STEPS="3")
    raised = next((event for event in run.events if "raised" in event), None)
    if raised and run.statuses and not any(run.statuses):
        yield warning("RC605", raised, "after an error here, the exit status is 0")


def failure(facts):
    """Returns what ends the run: the first error that is not about another rank."""
    run = facts.run
    errors = [f for f in facts.failures if not f.of_peer] or facts.failures
    mismatch = "the ranks call different collectives, or one with tensors of different sizes"
    mismatch = different_calls(run) or mismatch
    if not errors and "preamble" in run.output and run.steps:  # gloo has ended all ranks
        last = run.steps[0][-1]
        return error("RC102", last, f"{mismatch}, after step {len(run.steps[0])}")
    if not errors:
        lines = [line for line in run.lines() if re.search(r"Error|what\(\)", line)]
        return error("RC104", None, f"it fails: {one_line((lines or run.lines() or [''])[-1])}")
    first = errors[0]
    if first.is_refused:
        return unseen(f"how it ends: {first.text}")
    if first.ours:
        return unseen(f"how it ends: the audit failed: {first.text} (please report it)")
    if first.of_peer:
        done = [p for p in facts.run.ranks if any("left" in e or "finished" in e for e in p)]
        done = [p for p in done if rank_of(p) != first.rank]
        if ended := [f"rank {rank_of(p)} after {p[-1]['at']}" for p in done]:
            text = f"rank {first.rank} waits in a collective, in step {steps_of(facts, first) + 1},"
            text += f" for ranks that have ended: {', '.join(ended)} steps"
            return error("RC103", first.event, text)
        if "preamble" in run.output:  # gloo, of a message that is not as long as expected
            return error("RC102", first.event, f"{mismatch}: here is rank {first.rank}")
    if re.search(MISSING_HERE, first.text, re.I) and not first.of_cuda:
        return warning("RC104", first.event, f"it fails: {first.text}")
    return error("RC104", first.event, f"it fails: {first.text}")


def different_calls(run):
    """Says which collectives the ranks call where the first ones differ, and in which lines."""
    joined = [events for events in run.processes if any("joined" in e for e in events)]
    calls = [[event for event in events if event.get("of_all")] for events in joined]
    for events in zip_longest(*calls):
        if len({event and event["call"] for event in events}) > 1:
            called = sorted((e["rank"], e["call"], e["place"]) for e in events if e)
            lines = [f"rank {r} calls {c} in line {p.rpartition(':')[2]}" for r, c, p in called]
            ranks = len(events) - len(called)
            return ", and ".join(lines) + (", and others call nothing" if ranks else "")
    return ""


def port(facts):
    """Whether a second training can run on the same node."""
    for event in facts.events("port"):
        if re.search(rf"\b{event['port']}\b", facts.text):
            text = f"it always takes port {event['port']}: a second training on this node fails"
            yield warning("RC116", event, text)


def downloads(facts):
    """Whether one rank downloads the data, and the others wait for it."""
    ranks = facts.run.ranks
    before = [e.get("downloads") for p in facts.run.processes if p not in ranks for e in p]
    for load in facts.events("downloads"):
        key = load["downloads"], load["meetings"]
        count = sum(key in [(e.get("downloads"), e.get("meetings")) for e in p] for p in ranks)
        if count > 1 and load["downloads"] not in before:
            text = f"{count} ranks download {load['downloads']} at the same time"
            yield warning("RC115", load, f"{text}, into the same files")


def steps_of(facts, failure):
    return next((len(steps) for steps in facts.run.steps if steps[0]["rank"] == failure.rank), 0)


def ranks(facts):
    """Whether each rank trains, in one group, on a GPU of its own."""
    first = facts.first
    spawned = facts.launcher == "python" and len(facts.events("joined")) > 1
    if facts.multi and first["world_size"] == 1:
        text = f"{facts.ranks} processes train, each alone: none has joined a process group"
        yield warning("RC106", first, text)
    elif facts.ranks < first["world_size"] or (facts.ranks == 1 and spawned):
        yield warning("RC107", first, f"only {facts.ranks} of {facts.args.ranks} ranks train")
    used = facts.gpus
    if not len(used) > 1 == facts.args.nodes == max(map(len, used), default=0):
        return  # it uses no GPUs, or several each
    current = {steps[0]["current_gpu"] for steps in facts.run.steps}
    if len(set.union(*used)) < len(used):
        text = f"{len(used)} ranks use cuda:{min(used[0])}: set_device is missing"
        nccl = any("nccl" in event["backend"] for event in facts.events("backend"))
        say = error if nccl else warning
        yield say("RC108", first, text)
    elif current != set.union(*used):
        text = "set_device is missing: collectives of objects, and barriers, use cuda:0"
        yield warning("RC109", first, text)
    else:
        yield ok("each rank uses a GPU of its own")
