"""Asks what a kill and a restart cost: weights, samples, rates, the optimizer's state."""

import os
import re
from collections import Counter
from pathlib import Path

from rankcheck.questions.facts import Failure, epochs_of, error, ok, one_line, unseen, warning
from rankcheck.questions.gradients import same
from rankcheck.questions.snapshots import (
    is_same_file,
    loads_of,
    missing_state,
    saves_of,
    snapshot_names,
)

UNKNOWN = "how it survives a kill"


def kill(facts):
    """Whether it survives a kill."""
    saves = saves_of(facts)
    total = len(facts.run.steps[0])
    times = sorted({save["at"] for save in saves if 0 < save["at"] < total - 1})
    save = next((save for save in saves if save["at"] in times[:1]), None)
    compared = True
    if facts.args.no_kill:
        yield unseen(f"{UNKNOWN}: --no-kill")
    elif facts.outside:
        text = f"it saves to {facts.outside[0]}; let it save to a relative path"
        yield unseen(f"{UNKNOWN}: {text}")
    elif not times:
        yield unseen(f"{UNKNOWN}: it calls no torch.save before the last step here")
        kept = [save for save in saves if os.path.exists(save["saved"])] or saves
        if kept and kept[0]["at"] >= total > 1 and facts.run.succeeded:
            text = f"it saves only at its end, after {total} steps: a kill before loses all"
            yield warning("RC412", kept[0], text)
    else:
        number = killed_after(facts.whole_run(), times)
        save = next(save for save in saves if save["at"] == times[number])
        at = (save["at"] + [*times, total][number + 1] + 1) // 2
        resumed = list(resume(facts, save, at))
        has_state = not mixes(facts, facts.runs[-1])  # if a kill comes between two saves
        yield from resumed
        yield from loads_onto_gpus(facts)
        rules = [finding.rule for finding in resumed]
        compared = not {"RC502", "RC504"} & {*rules} and rules.count("RC501") <= len(facts.allowed)
        unknown = any(finding.text.startswith(UNKNOWN) for finding in resumed)
        if compared and not unknown:
            yield from kills_in_a_save(facts, save, has_state)
            yield from on_other_ranks(facts, save, at)
        yield from stop(facts, at)
    if save and not (compared and any(map(loads_of, facts.runs))):
        yield from missing_state(facts, save)


def turns_of(run):
    """Returns the steps after which a run saves each file, and those after which it may."""
    saved = {}
    for event in [event for event in run.events if event.get("saved")]:
        path = os.path.relpath(event["saved"], run.home.resolve())
        saved.setdefault(path, set()).add(event["at"])
    evaluated = {event["at"] for event in run.events if event.get("evaluates")}
    return saved, sorted(evaluated.union(*saved.values()))


def killed_after(run, times):
    """Returns the number of the save after which it is killed: next, it keeps an older file."""
    saved, turns = turns_of(run)
    several = [at for at in saved.values() if len(at) > 1]
    for number, time in enumerate(times):
        later = [turn for turn in turns if turn > time]
        if later and any(min(at) <= time and later[0] not in at for at in several):
            return number
    return 1 if len(times) > 2 else 0  # after one epoch, a script may begin anew on purpose


def resume(facts, save, at):
    whole = facts.whole_run()
    killed = facts.rerun("killed", AUDIT_SEED="7", AUDIT_SIGNAL=f"{at} 9")
    again = facts.rerun("killed", facts.args.resume, AUDIT_SEED="7")
    started = f"killed in step {at + 1} and started again, it"
    if killed.steps and not again.steps:
        yield no_step(again, save, started)
        if any("weights_only" in event.get("error", "") for event in again.events):
            facts.allowed["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
            started = started.replace(", it", " with weights_only=False, it")
            again = facts.rerun("killed", facts.args.resume, AUDIT_SEED="7")
            yield from [] if again.steps else [no_step(again, save, started)]
    if again.steps and errors_of(again) and not (again.limited or errors_of(whole)):
        yield no_step(again, save, started)
    if not (killed.steps and whole.steps and all(map(same_steps, killed.steps, whole.steps))):
        yield unseen(f"{UNKNOWN}: two runs with the same seed differ")
    elif again.steps:
        yield from compare_ranks(facts, whole, again, save, started)
        yield from saved_again(whole, again, started)


def loads_onto_gpus(facts):
    """Looks whether a run that is started again loads tensors onto the GPU that has saved them."""
    killed = [run for run in facts.runs if run.home.name.startswith("killed")]
    firsts = [load for run in killed for load in loads_of(run)[:1] if load["loaded_to"] == "None"]
    if facts.on_gpus and firsts:
        text = "torch.load without map_location: each rank loads onto the GPU that saved"
        yield warning("RC505", firsts[0], text)


def errors_of(run):
    """Returns the errors of a run's processes, those last that are about another rank."""
    errors = [Failure(event) for event in run.events if "error" in event]
    return sorted(errors, key=lambda failure: failure.of_peer)


def no_step(again, save, started):
    """Says why a run that is started again makes no step, or fails after some."""
    errors = errors_of(again)
    said = errors[0].text if errors else one_line(" ".join(again.lines()[-3:]))
    place = (errors and errors[0].event) or save
    say = error if loads_of(again) else warning
    how = f"fails after {len(again.steps[0])} steps" if again.steps else "makes no step"
    return say("RC501", place, f"{started} {how}: {said}")


def saved_again(whole, again, started):
    """Looks for a file that a resumed run saves where a whole one, of equal steps, does not."""
    digests = [step["digest"] for step in whole.steps[0]]
    first = again.steps[0][0]["digest"]
    number = digests.index(first) if first in digests else 0
    if not number or not same_steps(again.steps[0], whole.steps[0][number:]):
        return
    saved, turns = turns_of(whole)
    for save in [event for event in again.events if event.get("saved") and event["at"]]:
        path, at = os.path.relpath(save["saved"], again.home.resolve()), save["at"] + number
        before = min(saved.get(path, [at]))
        if before <= number and at in turns and at not in saved[path]:
            text = f"{started} writes {path} after step {at}, as a run without a kill does not"
            yield warning("RC516", save, f"{text}: is the best score in the snapshot?")


AT = {"mkdir": "after it has made", "write": "while it writes", "rename": "before it renames"}
AT["delete"] = "after it has deleted"


def kills_in_a_save(facts, first, has_state):
    """Kills it in the save that follows the first one: where it makes a folder, writes, renames.

    Of several files, also where it writes the last; with --every-kill, at each such event. What is
    written over in place has been named by then. If a resume `has_state`, it is the optimizer's.
    """
    whole = facts.whole_run()
    by_path = {}
    # Of rank 0, whose events these are: a folder that it makes may be there when others save.
    for save in [event for event in whole.ranks[0] if event.get("saved")]:
        by_path.setdefault(Path(save["saved"]).name, []).append(save)
    over = {name for name, saves in by_path.items() if is_same_file(saves)}
    events = [event for event in whole.events if "file_event" in event]
    made = [event for event in events if not event["file_event"].startswith("delete ")]
    later = [event["at"] for event in made if event["at"] > first["at"]]
    found = {e["file_event"]: e for e in reversed(events) if later and e["at"] == later[0]}
    last = [e for e in found if e.startswith("write ") and Path(e[6:]).name in by_path][:1]
    kinds, survived, told = set(), [], set()
    for event, noted in reversed(found.items()):
        kind, name = event.split(" ", 1)
        if over & {*Path(name).parts}:
            continue
        if kind in kinds and event not in last and not facts.args.every_kill:
            continue
        if Path(name).name in facts.args.resume:  # who starts it again names a whole file
            continue
        kinds.add(kind)
        folder = f"killed_{len(facts.runs)}"
        killed = facts.rerun(folder, AUDIT_SEED="7", AUDIT_EVENT=f"{noted['at']} {event}")
        if not (killed.folder / "sent").exists():  # another rank has made the folder, say
            continue
        again = facts.rerun(folder, facts.args.resume, AUDIT_SEED="7")
        why = fails(facts, again)
        say = error if why else warning
        why = why or (has_state and mixes(facts, again))
        if why and why not in told:
            yield say("RC513", noted, f"killed {AT[kind]} {name}, and started again, it {why}")
        elif not why:
            survived.append(f"{AT[kind]} {name}")
        told.add(why)
    if survived:
        yield ok(f"killed {', '.join(survived)}, and started again, it trains to the end")


PARTS = {"weights": "digest", "optimizer's state": "state", "learning rate": "rates"}


def on_other_ranks(facts, save, at):
    """Starts it again on other numbers of ranks, and says which parts differ."""
    whole = facts.whole_run()
    for ranks in facts.args.resume_ranks:
        folder = f"killed_{len(facts.runs)}"
        facts.rerun(folder, AUDIT_SEED="7", AUDIT_SIGNAL=f"{at} 9")
        again = facts.rerun(folder, facts.args.resume, ranks=ranks, AUDIT_SEED="7")
        load = next(iter(loads_of(again)), save)
        on_ranks = f"on {ranks} ranks" if ranks > 1 else "on one rank"
        started = f"killed in step {at + 1} and started again {on_ranks}, it"
        if why := fails(facts, again) or ("" if again.steps else "makes no step"):
            yield warning("RC515", load, f"{started} {why}")
            continue
        first = again.steps[0][0]
        alike = [[step[key] == first[key] for key in PARTS.values()] for step in whole.steps[0]]
        number = alike.index(max(alike))  # of the step whose weights it has, if any
        differ = [part for part, same in zip(PARTS, alike[number], strict=True) if not same]
        left = [step for steps in whole.steps for step in steps[number:]]
        lost, more = count_samples(left, [step for steps in again.steps for step in steps])
        epochs = [iterator for iterator in epochs_of(again.ranks[0]) if "trains" in iterator]
        repeated = max(ranks, facts.ranks) * len(epochs)  # at most, by samplers
        if first["sharded"]:
            yield ok(f"{started} trains to the end")
        elif differ:
            yield warning("RC515", load, f"{started} begins with another {', '.join(differ)}")
        elif again.limited or whole.limited or facts.draws:
            yield unseen(f"whether it trains what was left, {on_ranks}")
        elif max(lost, more) > repeated:
            text = f"{lost} samples are left out, and {more} are repeated"
            yield warning("RC515", load, f"{started} resumes after step {number}: {text}")
        else:
            yield ok(f"{started} resumes after step {number}, and trains what was left")


def count_samples(left, steps):
    """Returns how many samples of the steps that are left a resumed run leaves out, and repeats."""
    due, taken = (Counter(x for step in part for x in step["samples"]) for part in (left, steps))
    return (due - taken).total(), (taken - due).total()


def fails(facts, again):
    """Says how a run that was killed in a save fails later, if it does."""
    errors = errors_of(again)
    if errors and not again.limited:
        return f"fails{' before its first step' if not again.steps else ''}: {errors[0].text}"
    whole = facts.whole_run().steps[0]
    from_scratch = again.steps and again.steps[0][0]["digest"] == whole[0]["digest"]
    return "begins from scratch: the last snapshot is lost" if from_scratch else ""


def mixes(facts, again):
    """Says of a run that was killed in a save if its weights are of a newer file than the rest."""
    if not again.steps:
        return ""
    first = again.steps[0][0]
    then = [step for step in facts.whole_run().steps[0] if step["digest"] == first["digest"]]
    if not then or any(step["state"] == first["state"] for step in then):
        return ""
    text = f"has the weights of step {then[0]['at']}, and another optimizer's state"
    return f"{text}: the files of a save are not replaced together"


def stop(facts, at):
    """Looks at what it does at SIGTERM."""
    total = len(facts.whole_run().steps[0])
    stopped = facts.rerun("stopped", AUDIT_SIGNAL=f"{at} 15")
    regular = {e["at"] for e in facts.whole_run().events if "saved" in e}
    saves = [e["at"] for e in stopped.events if "saved" in e]
    # The signal comes in step `at` + 1: a regular save after step `at` was before it.
    saved = [n for n in saves if n > at or (n == at and at not in regular)]
    if not any("finished" in event or "error" in event for event in stopped.events):
        saved = []  # the signal has ended all, one of them after its next regular save
    say = warning if facts.events("framework") else error  # whose own handler may hang
    if stopped.hangs:
        yield say("RC601", None, f"after SIGTERM: {one_line(stopped.hangs)}")
    elif re.search(r"DataLoader worker.*(killed|exited)", stopped.output):
        text = "SIGTERM, which torchrun sends to data workers, too, ends them, and their rank"
        text += " fails before it saves: let worker_init_fn call os.setsid()"
        loader = next((event for event in stopped.events if "iterator" in event), None)
        say = error if facts.launcher == "torchrun" else warning  # another may tell ranks alone
        yield say("RC603", loader, text)
    elif saved and "gloo/" in stopped.output:
        text = "after SIGTERM, a rank stops, and another fails in a collective"
        yield warning("RC602", None, text)
    elif saved and len(stopped.steps[0]) < total:
        yield ok(f"SIGTERM in step {at + 1}: it saves after {saved[-1]}, and ends")
    elif stopped.steps and len(stopped.steps[0]) == total:
        yield unseen("whether it saves at SIGTERM: it ends before it may look")
    else:
        yield warning("RC604", None, "at SIGTERM, nothing is saved")


def same_steps(steps, others):
    return all(map(same, steps, others))


def compare_ranks(facts, whole, again, save, started):
    """Returns what is found on the first rank on which something is, or on rank 0."""
    epochs = [[e["at"] for e in events if e.get("trains")] for events in whole.ranks]
    ranks = [part for part in zip(epochs, whole.steps, again.steps, strict=False) if all(part[1:])]
    if not ranks:
        return [unseen(f"{UNKNOWN}: on some ranks, it made no step")]
    found = [list(compare(facts, *steps, again, save, started)) for steps in ranks]
    return next((one for one in found if any(f.rule for f in one)), found[0])


def compare(facts, epochs, whole, steps, again, save, started):
    """Compares a rank's steps after a kill with those of a run without, of which epochs begin."""
    load = next(iter(loads_of(again)), save)
    numbers = [n for n, s in enumerate(whole) if s["digest"] == steps[0]["digest"]]
    if steps[0]["foreign"] and not whole[0]["foreign"]:
        text = "its optimizer holds none of the model's weights: were they replaced later?"
        yield error("RC502", load, f"{started} trains nothing: {text}")
    elif len(numbers) > 1 and (load is not save or len(steps) < len(whole)):
        yield unseen("where it resumes: its weights do not change")
    elif not numbers or 0 in numbers:
        what = "begins from scratch" if numbers else "begins with weights that it never had"
        rounded = [n for n, s in enumerate(whole) if n and is_rounded(steps[0], s)]
        if not numbers and rounded:
            text = f"begins with the weights of step {rounded[-1]} in 16 bits: are they saved so?"
            yield warning("RC514", load, f"{started} {text}")
            return
        yield warning("RC504", load, f"{started} {what}: does it need --resume?")
    else:
        is_whole = not (again.limited or facts.whole_run().limited)
        parts = epochs, whole, steps, is_whole, numbers[0]
        has_optimizer = "param_groups" in snapshot_names(facts)
        yield from compare_steps(*parts, load, started, facts.draws, has_optimizer)


def compare_steps(epochs, whole, steps, is_whole, number, load, started, draws, has_optimizer):
    """Compares the steps of a resumed run with those after step `number` of a whole one."""
    pairs = list(zip(steps, whole[number:], strict=False))
    lacks = steps[0]["stateful"] < pairs[0][1]["stateful"]
    if lacks:
        text = "the snapshot lacks the optimizer's state"
        text = "the optimizer's state is saved, but not loaded" if has_optimizer else text
        say = error if has_optimizer else warning
        yield say("RC503", load, f"{started} has no momentum or the like: {text}")
    rest = len(whole) - number
    trains_alike = all(same(a, b) for a, b in pairs)
    skips = steps[0]["scale"] is not None and draws_alike(steps, whole[number:])
    # A second optimizer's step may take no batch, but only numbers that are drawn anew.
    batches = [pair for pair in pairs if any(step["indices"] for step in pair)] or pairs
    same_samples = skips or all(takes_same(a, b) for a, b in batches)
    are_equal = (skips and not draws) or all(a["samples"] == b["samples"] for a, b in batches)
    schedule = lost_schedule(pairs)
    if schedule and not trains_alike:
        yield warning("RC508", load, f"{started} does not resume its learning rate: {schedule}")
    epoch = other_epoch(epochs, whole, steps, number) if is_whole else ""
    if epoch:
        yield error("RC507", load, f"{started} has the weights of step {number}, and {epoch}")
    elif (trains_alike or same_samples > skips) and is_whole and len(steps) != rest:
        yield warning("RC506", load, f"{started} makes {len(steps)} steps, but {rest} were left")
    elif trains_alike:
        yield resumes(whole, pairs, is_whole, number, load, started)
    elif draws and same_samples and not are_equal:
        yield unseen("whether it trains on as without a kill: random numbers make its samples")
    elif not same_samples or not (are_equal or any(step["random"] for step in steps)):
        yield other_samples(whole, steps, is_whole and not draws, number, load, started)
    elif not lacks and not schedule:
        rule, text = difference(pairs)
        yield warning(rule, load, f"{started} takes the same samples, but {text}")


def other_samples(whole, steps, counts, number, load, started):
    """Says with which samples a resumed run goes on, and if it `counts`, how many it leaves out."""
    repeated = [n for n, s in enumerate(whole) if s["samples"] and takes_same(s, steps[0])]
    next_one = repeated[0] if repeated else 0
    text = f"{started} takes different samples than without a kill"
    if repeated and next_one < number:
        text = f"{started} has the weights of step {number}, and takes again the"
        text += f" samples of step {next_one + 1} and those that follow"
    elif next_one > number:
        text = f"{started} has the weights of step {number}, and goes on with the samples of step"
        text += f" {next_one + 1}: those between are not trained"
    lost, more = count_samples(whole[number:], steps)
    if counts and lost + more:
        text += f" (on this rank, {lost} samples are left out, and {more} are repeated)"
    return warning("RC507", load, text)


def resumes(whole, pairs, is_whole, number, load, started):
    """Returns what is said of equal steps: ok only where what they may have lost would show."""
    if text := lost_schedule(pairs):
        return warning("RC508", load, f"{started} has the right learning rate here, but {text}")
    if pairs[0][1]["stateful"] and len(pairs) == 1:
        return unseen("whether it resumes with its optimizer's state: one step is left")
    earlier = [map(takes_same, whole[n:], whole[number:]) for n in range(number)]
    if not is_whole and any(map(all, earlier)):
        text = "epochs have the same samples in the same order, and --steps or --seconds ended one"
        return unseen(f"whether it resumes in the right epoch: {text}")
    return ok(f"{started} resumes after step {number}, and trains as without a kill")


def lost_schedule(pairs):
    """Says at which step a schedule is, if not at the right one in any step of the pairs."""
    rates = [[step["rates"] for step in pair] for pair in pairs]
    right = all(a == b for a, b in rates) and rates[0] != rates[-1]
    # A scaler skips steps, and none of a schedule.
    if right or any(a["scheduled"] == b["scheduled"] or a["scale"] != b["scale"] for a, b in pairs):
        return ""
    found, expected = (", ".join(map(str, step["scheduled"])) for step in pairs[0])
    return f"its schedule is at step {found}, not {expected}: is it saved, and loaded?"


def other_epoch(epochs, whole, steps, number):
    """Says which epoch is trained again, or left out, by a run that resumes after step `number`."""
    begins = len(whole) - len(steps)  # if it ends where the whole run does
    is_other = number != begins > 0 and {number, begins} <= {*epochs}  # else it may begin anew
    if not is_other or not all(map(takes_same, steps, whole[begins:])):
        return ""
    if begins < number:
        text = f"takes again the samples of step {begins + 1} and those that follow, a whole epoch:"
        return f"{text} is epoch saved, not epoch + 1?"
    return f"goes on with the samples of step {begins + 1}: the epoch between is not trained"


def draws_alike(steps, others):
    """Whether two runs draw the same samples, whichever steps a gradient scaler skips."""
    drawn = [[index for step in part for index in step["indices"]] for part in (steps, others)]
    length = min(map(len, drawn))
    return length > 0 and None not in drawn[0] and drawn[0][:length] == drawn[1][:length]


def is_rounded(step, other):
    return any(a == b for a, b in zip(step["rounded"], other["rounded"], strict=True))


def takes_same(step, other):
    """Whether two steps take the same samples, by their contents, or else by their indices.

    An evaluation's may come before the indices, if its batches came where gradients were on.
    """
    if step["samples"] == other["samples"]:
        return True
    indices, others = step["indices"], other["indices"]
    if indices and others and None not in indices + others:
        size = min(len(indices), len(others))
        return indices[-size:] == others[-size:]
    return False


def difference(pairs):
    """Returns what differs first where a resumed run takes the same samples: a rule and a text."""
    rates = next(((a["rates"], b["rates"]) for a, b in pairs if a["rates"] != b["rates"]), None)
    first, other = pairs[0]
    if rates:
        text = f"the learning rate is {rates[0][0]:g}, not {rates[1][0]:g}: is its schedule saved?"
        return "RC508", text
    if first["state"] != other["state"]:
        return "RC509", "the optimizer's state differs from the saved one"
    if first["scale"] != other["scale"]:
        return "RC510", f"the scaler's factor is {first['scale']:g}, not {other['scale']:g}"
    if any(a["random"] for a, _ in pairs) and first["random_state"] != other["random_state"]:
        text = "draws different random numbers in a step: with dropout, that may be right"
        return "RC511", text
    return "RC512", "differs: what else does it keep?"
