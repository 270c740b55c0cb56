"""What tools.audit asks of snapshots: who writes them, how, and what a kill costs."""

import contextlib
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from tools.audit.training import same

LOADING, SAVING = "singlegpu.md#loading-a-snapshot", "singlegpu.md#saving-a-snapshot"
ONE_RANK = "multigpu.md#logging-and-saving-on-one-rank"


def one_line(text):
    return " ".join(text.split())


def size_of(path):
    return sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())


def is_saved(file):
    """Whether a file is a whole one of torch.save, and no part of a distributed checkpoint."""
    with contextlib.suppress(RuntimeError, OSError):
        return file.suffix != ".distcp" and bool(torch._C.PyTorchFileReader(str(file)))
    return False


def names_in(state):
    """Yields the keys of all dicts of a snapshot."""
    if isinstance(state, dict):
        yield from map(str, state)
        state = state.values()
    if not isinstance(state, str | torch.Tensor) and hasattr(state, "__iter__"):
        for value in state:
            yield from names_in(value)


class Snapshots:
    """Questions about what is saved; a part of questions.Audit."""

    def look_at_saves(self, run):
        by_process = [[e for e in events if e.get("saved")] for events in run.processes]
        saves = [save for saves in by_process for save in saves]
        writers = Counter(path for saves in by_process for path in {s["saved"] for s in saves})
        self.look_at_writers(run, saves, writers)
        for events, path in [(events, path) for events in by_process for path in writers]:
            self.look_at_overwriting([e for e in events if e["saved"] == path], Path(path))
        self.look_into_files(run, saves)
        total = len(run.steps[0])
        if saves and not run.limited and saves[-1]["at"] < total:
            text = f"its last save comes after {saves[-1]['at']} of {total} steps"
            self.say("look", saves[-1], text, "singlegpu.md#the-training-loop")
        times = sorted({save["at"] for save in saves if 0 < save["at"] < total - 1})
        if self.args.no_kill:
            self.say("unseen", None, "how it survives a kill")
        elif self.outside:
            text = f"it saves to {self.outside[0]}; let it save to a relative path"
            self.say("unseen", None, f"how it survives a kill: {text}")
        elif not times:
            text = "it calls no torch.save before the last step here"
            self.say("unseen", None, f"how it survives a kill: {text}")
        else:
            self.kill_and_resume(next(s for s in saves if s["at"] == times[0]), [*times, total][1])

    def look_at_writers(self, run, saves, writers):
        for save in [save for save in saves if "folder" not in save]:
            number, name = writers[save["saved"]], Path(save["saved"]).name
            if number > 1:
                text = f"{number} ranks write {name}, one over the other's"
                self.say("wrong", save, text, ONE_RANK)
        renames = [event for event in run.events if event.get("renamed") in writers]
        for rename in renames:
            name = Path(rename["to"]).name
            if not rename["synced"]:
                text = f"{name} is renamed without fsync: a power failure may leave it empty"
                self.say("look", rename, text, SAVING)
            if len({e["rank"] for e in renames if e["to"] == rename["to"]}) > 1:
                self.say("look", rename, f"several ranks write {name}: one is enough", ONE_RANK)

    def look_at_overwriting(self, saves, path):
        over = any(b["inode"] and a["inode"] in (None, b["inode"]) for a, b in pairwise(saves))
        if over and path.exists():
            others = [other for other in path.parent.iterdir() if other.is_dir() or is_saved(other)]
            beside = [size_of(other) for other in others]
            kind = "look" if len([n for n in beside if n > size_of(path) / 2]) > 1 else "wrong"
            text = "writes over the last snapshot: killed meanwhile, it leaves none"
            self.say(kind, saves[0], text, SAVING)

    def look_into_files(self, run, saves):
        """Looks whether files load with weights_only, and what is in them."""
        names = set()
        for file in filter(is_saved, run.home.rglob("*") if saves else []):
            if refused := get_unsafe_globals_in_checkpoint(file):
                text = f"to load {file.name} is unsafe: weights_only=True refuses {refused[0]}"
                self.say("look", saves[0], text, SAVING)
            else:
                names.update(names_in(torch.load(file, "cpu", weights_only=True)))
        for wrapper in ("module.", "_orig_mod."):
            if any(name.startswith(wrapper) for name in names):
                text = f"names in the snapshot begin with {wrapper}: save the model inside"
                self.say("look", saves[0], text, SAVING)
        if names and any(step["scales"] for step in run.steps[0]) and "growth_factor" not in names:
            page = "recipes/mixed_precision.md#the-scaler-in-the-snapshot"
            self.say("look", saves[0], "the state of the gradient scaler is not saved", page)

    def kill_and_resume(self, save, next_save):
        at = (save["at"] + next_save + 1) // 2
        whole = self.whole_run()
        killed = self.run("killed", AUDIT_SEED="7", AUDIT_SIGNAL=f"{at} 9")
        again = self.run("killed", self.args.resume, AUDIT_SEED="7")
        if not all(map(same, killed.steps[0], whole.steps[0])):
            self.say("unseen", None, "how it survives a kill: two runs with the same seed differ")
        elif not again.steps:
            printed = one_line(" ".join(again.lines()[-3:]))
            text = f"killed in step {at + 1} and started again, it makes no step: {printed}"
            loads = any("loaded_to" in event for event in again.events)
            self.say("wrong" if loads else "look", save, text, "singlegpu.md")
        else:
            self.compare(whole.steps[0], again, at, save)
        self.stop(at, len(whole.steps[0]))

    def stop(self, at, total):
        """Looks at what it does at SIGTERM."""
        stopped = self.run("stopped", AUDIT_SIGNAL=f"{at} 15")
        saved = [e["at"] for e in stopped.events if "saved" in e and e["at"] >= at]
        page = "preemptible.md"
        if stopped.hangs:
            self.say("wrong", None, f"after SIGTERM: {one_line(stopped.hangs)}", page)
        elif saved and "gloo/" in stopped.output:
            text = "after SIGTERM, a rank stops, and another fails in a collective"
            self.say("wrong", None, text, page)
        elif re.search(r"DataLoader worker.*(killed|exited)", stopped.output):
            text = "SIGTERM, which torchrun sends to data workers, too, ends them, and their rank"
            text += " fails before it saves: let worker_init_fn call os.setsid()"
            loader = next((event for event in stopped.events if "iterator" in event), None)
            self.say("wrong", loader, text, f"{page}#data-workers")
        elif saved and len(stopped.steps[0]) < total:
            self.say("ok", None, f"SIGTERM in step {at + 1}: it saves after {saved[0]}, and ends")
        elif len(stopped.steps[0]) == total:
            self.say("unseen", None, "whether it saves at SIGTERM: it ends before it may look")
        else:
            self.say("look", None, "at SIGTERM, nothing is saved", page)

    def compare(self, whole, again, at, save):
        """Compares the steps after a kill with those of a run without one."""
        steps = again.steps[0]
        load = next((event for event in again.events if "loaded_to" in event), save)
        started = f"killed in step {at + 1} and started again, it"
        numbers = [n for n, s in enumerate(whole[: at + 1]) if s["digest"] == steps[0]["digest"]]
        if len(numbers) > 1 and (load is not save or len(steps) < len(whole)):
            self.say("unseen", None, "where it resumes: its weights do not change")
        elif not numbers or 0 in numbers:
            what = "begins from scratch" if numbers else "begins with weights that it never had"
            self.say("look", load, f"{started} {what}: does it need --resume?", LOADING)
        else:
            if self.gpus and load.get("loaded_to") == "None":
                text = "torch.load without map_location: each loads onto the GPU that has saved"
                self.say("look", load, text, LOADING)
            self.compare_steps(whole, steps, numbers[0], load, started)

    def compare_steps(self, whole, steps, number, load, started):
        """Compares the steps of a resumed run with those after step `number` of another."""
        pairs = list(zip(steps, whole[number:], strict=False))
        repeated = [n for n, s in enumerate(whole) if s["samples"] == steps[0]["samples"] != []]
        lacks = steps[0]["stateful"] < pairs[0][1]["stateful"]
        if lacks:
            text = "the snapshot lacks the optimizer's state, or it is not loaded"
            self.say("wrong", load, f"{started} has no momentum or the like: {text}", LOADING)
        if all(same(a, b) for a, b in pairs):
            text = f"{started} resumes after step {number}, and trains as without a kill"
            self.say("ok", None, text)
        elif any(a["samples"] != b["samples"] for a, b in pairs):
            text = f"{started} takes other samples than without a kill"
            if repeated and repeated[0] < number:
                text = f"{started} has the weights of step {number}, and takes again the"
                text += f" samples of step {repeated[0] + 1} and those that follow"
            self.say("look", load, text, "resumable.md")
        elif not lacks:
            text = f"{started} takes the same samples, but differs: what else does it keep?"
            self.say("look", load, text, "your_project.md#what-to-check")
