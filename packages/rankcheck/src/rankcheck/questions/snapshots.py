"""Asks of snapshots: who writes them, how, and what is in them."""

import contextlib
import linecache
import os
import pickletools
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from rankcheck.questions.facts import error, warning


def size_of(path):
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def is_saved(file):
    """Whether a file is a whole one of torch.save, and no part of a distributed checkpoint."""
    with contextlib.suppress(RuntimeError, OSError):
        return file.suffix != ".distcp" and bool(torch._C.PyTorchFileReader(str(file)))
    return False


def is_snapshot(path):
    return (path / ".metadata").exists() or (path.is_file() and is_saved(path))


def saves_of(facts):
    return [event for event in facts.events("saved") if event["saved"]]


def loads_of(run):
    """Returns what a run has loaded, but for files outside of its folder, such as data."""
    home = str(run.home.resolve())
    loads = [event for event in run.events if "loaded_to" in event]
    return [load for load in loads if os.path.realpath(load.get("loaded") or home).startswith(home)]


def files(facts):
    """Whether what it saves is whole, complete, and can be loaded."""
    by_process = [[e for e in events if e.get("saved")] for events in facts.run.processes]
    saves = saves_of(facts)
    writers = Counter(path for saves in by_process for path in {s["saved"] for s in saves})
    yield from writing(facts, saves, writers)
    yield from racing(facts)
    parts = [save for save in saves if save.get("part")]
    if len({save["rank"] for save in parts}) == 1 < facts.ranks:
        text = f"only rank {parts[0]['rank']} saves its part of the sharded tensors"
        yield error("RC411", parts[0], f"{text}: the other parts are lost")
    parts = [save for save in saves if save.get("some_states")]
    last = [steps[-1] for steps in facts.by_optimizer]
    divided = any(len({s["digest"] for s in x}) == 1 < len({s["state"] for s in x}) for x in last)
    if divided and len({save["rank"] for save in parts}) == 1:
        text = f"only rank {parts[0]['rank']} saves the optimizer's state of its own parameters"
        yield error("RC411", parts[0], f"{text}: that of the others is lost")
    weights = facts.run.steps[0][0]["held"]
    renamed = {Path(event["to"]) for event in facts.run.events if "renamed" in event}
    for events in by_process:
        order = [event["saved"] for event in events]
        for path in dict.fromkeys(order):
            last = len(order) - order[::-1].index(path)
            later = {Path(p).resolve() for p in order[last:] if p not in order[:last]}
            saved = [e for e in events if e["saved"] == path]
            own = {*map(Path, order)} | renamed
            yield from overwriting(saved, Path(path), own, later, renamed, weights)
    yield from contents(facts, saves)
    total = len(facts.run.steps[0])
    loaded = {load.get("loaded") for load in loads_of(facts.run)}
    is_data = bool(saves) and saves[-1]["at"] == 0 and saves[-1]["saved"] in loaded
    if saves and not facts.run.limited and saves[-1]["at"] < total and not is_data:
        text = f"its last save comes after {saves[-1]['at']} of {total} steps"
        yield warning("RC410", saves[-1], text)


def writing(facts, saves, writers):
    """Looks who writes a file, and whether it is on the disk before it gets its name."""
    for save in [save for save in saves if "folder" not in save]:
        number, name = writers[save["saved"]], Path(save["saved"]).name
        if number > 1:
            turns = {(s["at"], s["meetings"]) for s in saves if s["saved"] == save["saved"]}
            times = sum(s["saved"] == save["saved"] for s in saves)
            say = error if len(turns) < times else warning  # between others, ranks have met
            yield say("RC401", save, f"{number} ranks write {name}, one over the other's")
    opened = [{e["opened"] for e in events if "opened" in e} for events in facts.run.processes]
    ranks = Counter(path for paths in opened for path in paths)
    for event in facts.events("opened"):
        number, name = ranks[event["opened"]], Path(event["opened"]).name
        if number > 1 and event["opened"] not in writers:
            yield warning("RC401", event, f"{number} ranks write {name}, one over the other's")
    renames = [event for event in facts.run.events if event.get("renamed") in writers]
    for rename in renames:
        name = Path(rename["to"]).name
        if not rename["synced"]:
            text = f"{name} is renamed without fsync: a power failure may leave it empty"
            yield warning("RC403", rename, text)
        if len({e["rank"] for e in renames if e["to"] == rename["to"]}) > 1:
            yield warning("RC402", rename, f"several ranks write {name}: one is enough")


def racing(facts):
    """Looks for a folder that several ranks make at once: one fails where both find none."""
    for events in facts.run.processes:
        others = [e for other in facts.run.processes if other is not events for e in other]
        for made in [event for event in events if "makes" in event]:
            looks = [e for e in others if e.get("looks_for") == made["makes"]]
            at_once = [e["place"] for e in looks if e["meetings"] == made["meetings"]]
            if any(is_if_before(place, made["place"]) for place in at_once):
                text = f"several ranks make {Path(made['makes']).name}, if they find none"
                yield warning("RC413", made, f"{text}: in a race, one fails")


def is_if_before(place, made):
    """Whether a line is that which makes a folder, or the one before it, and asks for no rank."""
    file, _, number = place.rpartition(":")
    made_in, _, made_number = made.rpartition(":")
    near = file == made_in and 0 <= int(made_number or 0) - int(number or 0) <= 1
    return near and "rank" not in linecache.getline(file, int(number)).lower()


def is_same_file(saves):
    return any(b["inode"] and a["inode"] in (None, b["inode"]) for a, b in pairwise(saves))


def overwriting(saves, path, own, later, renamed, weights):
    """Looks whether a file is written over, and which other is left if that is interrupted.

    None of those that are saved for the first time later, such as a final model.
    """
    if not is_same_file(saves) or not path.exists():
        return
    beside = [other for other in path.parent.iterdir() if not other.is_symlink()]
    others = {other.resolve() for other in [*beside, *own]} - {path.resolve()}
    others = [other for other in others - later if is_snapshot(other)]
    sizes = {other: size_of(other) for other in others}
    left = [other for other in others if sizes[other] > size_of(path) / 2]
    if any(sizes[other] >= size_of(path) for other in {*left} & {r.resolve() for r in renamed}):
        return  # what is written over is not the snapshot
    text = "writes over the last snapshot: killed meanwhile, it leaves none"
    if not left:
        holds_weights = size_of(path) >= 2 * weights  # bytes, of 16 bits each
        say = error if holds_weights else warning
        yield say("RC404", saves[0], text)
    else:
        text = "writes over a snapshot: killed meanwhile, it leaves only others"
        yield warning("RC404", saves[0], text)


def contents(facts, saves):
    """Looks whether files load with weights_only, and what is in them."""
    for file in own_files(facts):
        named = [save for save in saves if Path(save["saved"]).name == file.name]
        save = [*named, saves[0]][0]  # another name, before it is renamed
        if unsafe := get_unsafe_globals_in_checkpoint(file):
            text = f"loading {file.name} is unsafe: weights_only=True refuses {unsafe[0]}"
            yield warning("RC405", save, text)
        for wrapper in ("module.", "_orig_mod."):
            if any(name.startswith(wrapper) for name in names_in(file)):
                text = f"names in the snapshot begin with {wrapper}: save the model inside"
                yield warning("RC406", save, text)
    names = snapshot_names(facts)
    scales = any(step["scale"] for step in facts.run.steps[0])
    if scales and names and "growth_factor" not in names:
        yield warning("RC407", saves[0], "the state of the gradient scaler is not saved")


def own_files(facts):
    """Returns the files that the script itself saves: a package knows how to load its own."""
    saves = saves_of(facts)
    by_library = {Path(save["saved"]).name for save in saves if save.get("by_library")}
    files = filter(is_saved, sorted(facts.run.home.rglob("*")) if saves else [])
    return [file for file in files if file.name not in by_library]


def snapshot_names(facts):
    """Returns the keys, and other strings, of what the script itself saves."""
    folders = facts.run.home.rglob(".metadata") if saves_of(facts) else ()
    names = set().union(*map(names_in, own_files(facts)), *map(names_in, folders))
    return {part for name in names for part in name.split(".")}  # as in distributed checkpoints


def names_in(file):
    pickled = file.read_bytes()
    if is_saved(file):
        pickled = torch._C.PyTorchFileReader(str(file)).get_record("data.pkl")
    return {value for code, value, _ in pickletools.genops(pickled) if "UNICODE" in code.name}


def missing_state(facts, save):
    """Looks what the snapshots lack, where no run goes on with one, and so shows it."""
    names = snapshot_names(facts)
    steps = facts.run.steps[0]
    if not names or any(save.get("by_library") for save in saves_of(facts)):
        return
    if any(step["stateful"] for step in steps) and "param_groups" not in names:
        text = "the optimizer's state is not saved: a resumed run cannot train as before"
        yield warning("RC408", save, text)
    elif any(step["scheduled"] for step in steps) and "last_epoch" not in names:
        yield warning("RC409", save, "the state of the learning rate's schedule is not saved")
