"""The facts on which the questions are based: what a run of all ranks has shown."""

import os
import re
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rankcheck.folder import REFUSAL
from rankcheck.questions.gradients import kind_of_gradient

OURS = str(Path(__file__).parents[1])
# Functions of ours that call what the script has called: an error of that is the script's.
PASS_ON = {"observed", "wrapper", "told", "__torch_function__", "module_to", "join", "note_batch"}


class Finding(NamedTuple):
    level: str  # error, warning, ok or unseen
    rule: str  # such as RC201, of the folder rules; "" of ok and unseen
    place: str  # a file and a line, or ""
    text: str


def error(rule, event, text):
    return Finding("error", rule, event["place"] if event else "", text)


def warning(rule, event, text):
    return Finding("warning", rule, event["place"] if event else "", text)


def ok(text):
    return Finding("ok", "", "", text)


def unseen(text):
    return Finding("unseen", "", "", text)


def one_line(text):
    return " ".join(text.split())


def epochs_of(events):
    """Returns the iterators of DataLoaders that a process has used, in their order."""
    found, kept = {}, []
    for event in [event for event in events if "iterator" in event]:
        if "size" in event:
            found[event["iterator"]] = event | {"indices": [], "hashed": []}
            kept.append(found[event["iterator"]])
        elif "indices" in event:
            kept_lists = found[event["iterator"]]
            kept_lists["indices"] += event["indices"]
            kept_lists["hashed"] += event["hashed"]
        elif event["iterator"] in found:
            found[event["iterator"]] |= event | {"place": found[event["iterator"]]["place"]}
    return kept


class Failure:
    """The error with which a process ended: its text, where in the script, and whether by us."""

    def __init__(self, event):
        message = event["error"]
        refused = re.search(r"WeightsUnpickler error: [^\n]*?(?=\. Please|\.?\n|$)", message)
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        self.text = one_line(refused[0] if refused else text)[:300]
        self.rank = event["rank"]
        frames = event.get("frames", [])
        file, _, function = frames[-1] if frames else ("", 0, "")
        self.of_cuda = "CUDA error: invalid device" in message  # as CUDA says it
        self.is_refused = REFUSAL in message  # for the sake of the user's files
        self.ours = file.startswith(OURS) and function not in PASS_ON
        self.ours = self.ours and not self.of_cuda and not self.is_refused
        outside = ("<frozen", OURS, os.path.dirname(os.__file__))
        self.places = [
            f"{file}:{line}"
            for file, line, _ in frames
            if not file.startswith(outside) and "site-packages" not in file
        ]
        self.of_peer = bool(re.search("gloo|[Cc]onnection (closed|reset)|peer", message))

    @property
    def event(self):
        return {"place": self.places[-1]} if self.places else None


class Facts:
    """What the processes of one run have done; the questions are functions of it.

    `start` runs the script again, in a folder of a name, and returns that run; `text` is the
    script's.
    """

    def __init__(self, run, args, start, launcher, text=""):
        self.run = run
        self.args = args
        self.start = start
        self.launcher = launcher
        self.text = text
        self.runs = [run]
        self.whole = None
        self.allowed = {}  # variables of later runs, with which they load what torch refuses
        self.ranks = len(run.steps)
        self.first = run.steps[0][0] if run.steps else None
        self.steps = list(zip(*run.steps, strict=False))  # of all ranks

    def rerun(self, *args, **options):
        """Runs the script again, as `start` does."""
        self.runs.append(self.start(*args, **self.allowed, **options))
        return self.runs[-1]

    def whole_run(self, keep=""):
        """Runs the script with a seed, once; the batches of step `keep` are kept."""
        if self.whole is None:
            self.whole = self.rerun("whole", AUDIT_SEED="7", AUDIT_KEEP=keep)
        return self.whole

    def events(self, key):
        return [event for event in self.run.events if key in event]

    @cached_property
    def failures(self):
        """Returns the errors of processes, the first in time first."""
        events = sorted(self.events("error"), key=lambda event: event["time"])
        return [Failure(event) for event in events]

    @cached_property
    def by_optimizer(self):
        """Returns, for each optimizer, its steps, each with the events of all ranks."""
        by_rank = []
        for steps in self.run.steps:
            keys = dict.fromkeys(step["optimizer"] for step in steps)
            by_rank.append([[s for s in steps if s["optimizer"] == key] for key in keys])
        return [list(zip(*ranks, strict=False)) for ranks in zip(*by_rank, strict=False)]

    @cached_property
    def kinds(self):
        """Returns, for each optimizer, what the gradients of its steps are."""
        return [{kind_of_gradient(step) for step in steps} for steps in self.by_optimizer]

    @cached_property
    def replicas(self):
        """Whether the ranks train one model, each on data of its own, as far as that is seen."""
        if self.ranks < 2:
            return False
        for steps, kinds in zip(self.by_optimizer, self.kinds, strict=True):
            first = steps[0]
            if {"mean", "sum"} & kinds or all(s["ddp"] or s["fsdp"] for s in first):
                return True
            if not first[0]["sharded"] and len({s["called"] for s in first}) == 1:
                return True
        return False

    @cached_property
    def loaders(self):
        """Returns, for each rank, the iterators of DataLoaders that it has used."""
        return [epochs_of(events) for events in self.run.ranks]

    @cached_property
    def epochs(self):
        """Returns the epochs of training: of each, the iterator of each rank."""
        trained = [[it for it in iterators if "trains" in it] for iterators in self.loaders]
        return list(zip(*trained, strict=False))

    @cached_property
    def draws(self):
        """Whether random numbers make samples."""
        return any(path.read_text() for path in self.run.folder.glob("*.drawn"))

    @cached_property
    def gpus(self):
        """Returns the GPUs that each process has put something on."""
        used = [{e.get("gpu") for e in events} - {None} for events in self.run.processes]
        return [numbers for numbers in used if numbers]

    @property
    def on_gpus(self):
        return any(steps[-1].get("on_gpus") for steps in self.run.steps)

    @cached_property
    def outside(self):
        """Returns what was saved outside of the run's folder, and is still there."""
        saved = [
            e.get("saved") or e.get("to") for e in self.run.events if e.keys() & {"saved", "to"}
        ]
        paths = [Path(path).resolve() for path in saved if path and os.path.exists(path)]
        return [path for path in paths if not path.is_relative_to(self.run.home.resolve())]

    @property
    def multi(self):
        return self.ranks > 1
