"""What tools.audit asks of a script, and how it starts it.

"wrong" is said only of what no right script does; of what most right ones do not, "look".
"""

import ast
import functools
import os
import shlex
import tempfile
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

from tools.judge.run import Run
from tools.launch.jobs import Shell, free_port
from tools.steps import ROOT
from tools.watch.__main__ import launcher

PATHS = [str(ROOT / "tools" / part) for part in ("audit/inside", "witness")]
START = """import multiprocessing, os, sys
multiprocessing.set_start_method("fork", force=True)  # as where torchrun starts it
for name in {unset}:
    os.environ.pop(name, None)
sys.argv[0] = {script!r}
sys.path[:1] = {paths}
import runpy, audit_inside
audit_inside.install()
runpy.run_path({script!r}, run_name="__main__")
"""
OF_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
OF_TORCHRUN += ["GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
ROUNDING = 1e-4  # of a gradient's product, relative to the largest
SMALL = 16  # numbers, as collectives of losses and counts have: no gradient


class CannotRunError(Exception):
    """What the script has printed, and that no step of it was seen."""


class Finding(NamedTuple):
    kind: str  # wrong, look, ok or unseen
    place: str
    text: str
    page: str = ""


def sources(script):
    """Returns the text of a script and of the files beside it that it imports."""
    texts = {}
    paths = [script]
    for path in paths:  # which grows
        texts[path] = path.read_text()
        for node in ast.walk(ast.parse(texts[path], path.name)):
            names = [alias.name for alias in getattr(node, "names", [])]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            for name in names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                found = script.parent / f"{name.replace('.', '/')}.py"
                if found.is_file() and found not in paths:
                    paths.append(found)
    return "\n".join(texts.values())


def close(found, expected, scale):
    return all(abs(a - b) <= ROUNDING * scale for a, b in zip(found, expected, strict=True))


def sums(vectors):
    return [sum(values) for values in zip(*vectors, strict=True)]


class Audit:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.shell = Shell(folder)
        try:
            self.text = sources(args.script)
        except SyntaxError as error:
            raise SystemExit(f"audit: {error}") from error
        self.launcher = args.launcher or launcher(self.text, args.ranks).split()[0]
        self.gpus = "cuda" in self.text or "accelerator" in self.text
        self.findings = []

    def say(self, kind, event, text, page=""):
        """Keeps a finding, once; `event` has its place in the script."""
        finding = Finding(kind, (event or {}).get("place", ""), text, page)
        if finding not in self.findings:
            self.findings.append(finding)

    def run(self, folder, more="", **variables):
        """Starts the script in a folder; returns its run."""
        events = Path(tempfile.mkdtemp(dir=self.folder))
        own_ranks = self.launcher == "python"
        script = str(self.args.script)
        start = events / "start.py"
        paths = [str(self.args.script.parent), *PATHS]
        start.write_text(
            START.format(script=script, paths=paths, unset=OF_TORCHRUN if own_ranks else [])
        )
        variables |= {"WITNESS_FOLDER": str(events), "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"ACCELERATE_USE_CPU": "true", "TORCHDYNAMO_DISABLE": "1"}
        variables |= {"AUDIT_STEPS": str(self.args.steps), "AUDIT_SECONDS": str(self.args.seconds)}
        variables["AUDIT_SIGNAL"] = variables.get("AUDIT_SIGNAL", "-1 0")
        if own_ranks:
            variables["AUDIT_PORT"] = str(free_port())
        if self.gpus:
            variables["AUDIT_GPUS"] = str(self.args.ranks // self.args.nodes)
        folders = [folder / f"node{node}" for node in range(self.args.nodes)]
        folder.mkdir(exist_ok=True)
        count = 1 if own_ranks else self.args.ranks
        folders = [folders[rank * self.args.nodes // count] for rank in range(count)]
        arguments = " ".join([*map(shlex.quote, self.args.arguments), more])
        job = self.shell.ranks_on(folders, f"{start} {arguments}", **variables)
        run = Run([job], events, self.args.script)
        run.limited = (events / "limited").exists()
        return run

    def ask(self):
        first = self.run(self.folder / "first")
        if not first.steps and self.gpus and "is_available" in self.text:
            self.gpus = False  # it can do without
            first = self.run(self.folder / "cpu")
        if not first.steps and not first.hangs:
            raise CannotRunError("\n".join(first.lines()[-12:]) or "It has printed nothing.")
        self.look_at_end(first)
        self.look_at_ranks(first)
        if first.steps:
            self.look_at_gradients(first)
            self.look_at_data(first)
            self.look_at_costs(first)
            self.look_at_saves(first)
            self.look_at_kills(first)
        return self.findings

    # How it runs

    def look_at_end(self, run):
        if run.hangs:
            self.say("wrong", None, " ".join(run.hangs.split()), "hangs.md")
        elif run.limited:
            self.say("unseen", None, f"its end: each run is ended after {self.args.steps} steps")
        elif any(run.statuses):
            self.say("wrong", None, f"it fails: {' / '.join(run.lines()[-3:])}", "errors.md")
        else:
            joined = [events for events in run.processes if any("joined" in e for e in events)]
            if any(not any("left" in e for e in events) for events in joined):
                text = "a rank ends without destroy_process_group, and may keep the others"
                self.say("look", None, text, "multigpu.md")
            self.say("ok", None, "it ends, with status 0")

    def look_at_ranks(self, run):
        sizes = [steps[0]["world_size"] for steps in run.steps]
        if len(sizes) > 1 and set(sizes) == {1}:
            text = f"{len(sizes)} processes train, each alone: none has joined a process group"
            self.say("wrong", run.steps[0][0], text, "multigpu.md")
        elif sizes and len(sizes) < max(sizes):
            self.say("look", None, f"{len(sizes)} of {max(sizes)} ranks make a step", "multigpu.md")
        elif len(sizes) > 1:
            self.say("ok", None, f"{len(sizes)} ranks train in one process group")
        used = [{e["gpu"] for e in events if "gpu" in e} for events in run.processes]
        used = [numbers for numbers in used if numbers]
        if self.args.nodes == 1 and len(used) > 1 and max(map(len, used)) == 1:
            if len(set.union(*used)) < len(used):
                text = f"{len(used)} ranks use cuda:{used[0].pop()}: call set_device first"
                self.say("wrong", None, text, "multigpu.md#the-process-group")
            else:
                self.say("ok", None, "each rank uses a GPU of its own")
        self.ranks = len(sizes)

    # Weights and gradients

    @staticmethod
    def optimizers(run):
        """Returns, for each optimizer, the steps of each rank."""
        by_rank = []
        for steps in run.steps:
            keys = list(dict.fromkeys(step["optimizer"] for step in steps))
            by_rank.append([[s for s in steps if s["optimizer"] == key] for key in keys])
        return list(zip(*by_rank, strict=False))

    def look_at_gradients(self, run):
        self.parallel = False  # whether the ranks train one model, each with data of its own
        for ranks in self.optimizers(run):
            self.look_at_learning(ranks)
            kinds = Counter(self.kind_of_gradient(step) for step in zip(*ranks, strict=False))
            if self.ranks > 1 and not ranks[0][0]["sharded"]:
                averaged = kinds["mean"] + kinds["sum"] > 0
                self.parallel |= averaged or all(steps[0]["ddp"] for steps in ranks)
                if kinds["sum"] and not kinds["own"]:
                    text = "the gradients are summed over the ranks: right if the loss is divided"
                    self.say("look", ranks[0][0], text, "your_project.md")
                self.look_at_weights(run, ranks, averaged)
        if self.ranks > 1 and run.steps[0][0]["sharded"]:
            self.say("unseen", None, "whether the ranks' weights agree: they are sharded")

    def kind_of_gradient(self, steps):
        """Says of a step what its gradient is: the mean of the ranks' own, or one of these."""
        own, used = [s["own"] for s in steps], [s["used"] for s in steps]
        known = [i for i in range(len(own[0])) if all(v[i] is not None for v in own + used)]
        own, used = ([[v[i] for i in known] for v in vectors] for vectors in (own, used))
        scale = max((abs(x) for v in own for x in v), default=0)
        if not scale or all(close(v, own[0], scale) for v in own):
            return "unknown"
        total = sums(own)
        square = sum(x * x for x in total)
        if square <= (ROUNDING * scale) ** 2:
            return "unknown"
        factor = sum(a * b for a, b in zip(used[0], total, strict=True)) / square  # of clipping
        if all(close(v, [factor * x for x in total], scale) for v in used) and factor > 0:
            return "sum" if abs(factor - 1) < ROUNDING else "mean"
        if all(close(a, b, scale) for a, b in zip(own, used, strict=True)):
            return "own"
        return "other"

    def look_at_learning(self, ranks):
        steps = [step for steps in ranks for step in steps]
        if any(step["weights"] != step["weights"] for step in steps):
            self.say("wrong", steps[0], "the weights become NaN", "errors.md")
        elif all(not step["largest"] for step in steps):
            text = "all gradients are 0 in every step: nothing is learned. Look at the loss"
            self.say("wrong", steps[0], text)
        elif len({step["digest"] for step in ranks[0]}) == 1 < len(ranks[0]):
            self.say("look", steps[0], "the weights never change: is the learning rate 0?")
        else:
            self.say("ok", None, "gradients change the weights")
        if self.never_cleared(list(zip(*ranks, strict=False))[:4]):
            text = "gradients add up from step to step: zero_grad is missing"
            self.say("wrong", steps[0], text, "singlegpu.md")
        training = [step["training"] for step in ranks[0]]
        if (True, False) in pairwise(training):
            later = ranks[0][training.index(False)]
            text = "after the first steps, the model trains in eval mode: train() is missing"
            self.say("wrong", later, text, "recipes/evaluate.md")

    @staticmethod
    def never_cleared(steps):
        """Whether each step adds the mean of the ranks' own gradients to that of the step before."""
        if len(steps) < 3 or any(None in s["own"] + s["used"] for ranks in steps for s in ranks):
            return False
        used = [ranks[0]["used"] for ranks in steps]
        own = [[x / len(ranks) for x in sums([s["own"] for s in ranks])] for ranks in steps]
        scale = max(abs(x) for v in own for x in v)
        added = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(used)]
        same = any(close(a, b, scale) for a, b in zip(used[1:], own[1:], strict=True))
        return not same and all(close(a, b, scale) for a, b in zip(added, own[1:], strict=True))

    def look_at_weights(self, run, ranks, averaged):
        ddp = all(steps[0]["ddp"] for steps in ranks)
        equal = [len({s["digest"] for s in step}) == 1 for step in zip(*ranks, strict=False)]
        if all(equal):
            self.say("ok", None, "all ranks have the same weights before each step")
            return
        number = equal.index(False)
        step = ranks[0][max(number - 1, 0)]
        sizes = [e["size"] for e in run.events if "collective" in e and e["at"] > 0]
        when = f"after step {number}" if number else "before the first step"
        text = f"{when}, the ranks have different weights"
        if ddp and not any(equal[number:]):
            text += (
                ": is the model called without its DDP wrapper, or changed after it was wrapped?"
            )
            self.say("wrong", step, text, "multigpu.md#ddp")
        elif averaged and not number:
            self.say("wrong", step, f"{text}: broadcast those of rank 0", "by_hand/ddp.md")
        elif max(sizes, default=0) < SMALL and not any(equal[number + 1 :]):
            self.say("wrong", step, f"{text}: no gradients are averaged", "multigpu.md#ddp")
        else:
            self.say("look", step, f"{text}: right only if they share a model, or average later")

    # Data

    @staticmethod
    def epochs(events):
        """Returns the iterators of DataLoaders that a process has trained with, in their order."""
        found = {}
        kept = []
        for event in events:
            if "iterator" in event:
                found[event["iterator"]] = epoch = {**event, "indices": [], "hashed": []}
                kept.append(epoch | {"trained": False, "ended": False})
                found[event["iterator"]] = kept[-1]
            elif "batch_of" in event:
                found[event["batch_of"]]["indices"] += event["indices"]
                found[event["batch_of"]]["hashed"] += event["hashed"]
            elif "trains" in event:
                found[event["trains"]]["trained"] = True
            elif "ends" in event:
                found[event["ends"]]["ended"] = True
        return [epoch for epoch in kept if epoch["trained"]]

    def look_at_data(self, run):
        processes = sorted(
            (events for events in run.processes if any("samples" in e for e in events)),
            key=lambda events: next(e["rank"] for e in events if "samples" in e),
        )
        by_rank = [self.epochs(events) for events in processes]
        epochs = list(zip(*by_rank, strict=False))
        place = epochs[0][0] if epochs else run.steps[0][0]
        if self.ranks > 1 and self.parallel:
            if self.samples_are_the_same(run):
                text = f"all {self.ranks} ranks train on the same samples"
                self.say("wrong", place, text, "multigpu.md#what-happens-without-the-sampler")
            elif epochs:
                self.look_at_shards(epochs)
            else:
                self.say("ok", None, "the ranks train on different samples")
        if len(by_rank[0]) > 1:
            self.look_at_order(*by_rank[0][:2])
        else:
            text = "whether the order of the samples differs from epoch to epoch: it has trained"
            self.say("unseen", None, f"{text} fewer than two with a DataLoader")

    @staticmethod
    def samples_are_the_same(run):
        steps = [[step["samples"] for step in ranks] for ranks in zip(*run.steps, strict=False)]
        several = len({sample for samples in steps for sample in samples[0]}) > 1
        return several and all(samples[0] and samples[0] == s for samples in steps for s in samples)

    def look_at_shards(self, epochs):
        """Looks whether the ranks' shares of an epoch overlap, and whether a sample is missing."""
        for shares in epochs:
            if not all(share["ended"] for share in shares):
                continue
            hashed = [set(share["hashed"]) for share in shares]
            size = shares[0]["size"]
            several = sum(map(len, hashed)) - len(set.union(*hashed))
            distinct = all(
                len(s["hashed"]) == len(h) > 1 for s, h in zip(shares, hashed, strict=True)
            )
            missing = size - len({i for s in shares for i in s["indices"]}) if size else 0
            page = "multigpu.md#what-happens-without-the-sampler"
            if distinct and all(h == hashed[0] for h in hashed):
                text = f"each rank trains on all {len(hashed[0])} samples of an epoch"
                self.say("wrong", shares[0], text, page)
            elif distinct and several >= len(shares):
                self.say(
                    "look", shares[0], f"{several} samples of an epoch come to two ranks", page
                )
            elif (
                missing > 0
                and len({s["size"] for s in shares}) == 1
                and None not in shares[0]["indices"]
            ):
                text = f"{missing} of {size} samples do not come in an epoch: drop_last?"
                self.say("look", shares[0], text, page)
            elif distinct:
                self.say("ok", None, "each sample comes to one rank in an epoch")
        self.look_at_copies(epochs)

    def look_at_copies(self, epochs):
        """Looks whether a sample is the same on all ranks, where they share an order of samples."""
        known = [{} for _ in epochs[0]]
        split = {share["split"] for share in epochs[0]}
        shared = all(share["shuffle"] is not None for share in epochs[0])  # a DistributedSampler
        for shares in epochs:
            indices = [set(share["indices"]) for share in shares]
            overlap = sum(map(len, indices)) - len(set.union(*indices))
            shared &= overlap < max(len(shares), 2) or indices[0] == indices[1]
            for copies, share in zip(known, shares, strict=True):
                if len(share["hashed"]) == len(share["indices"]):
                    for index, hashed in zip(share["indices"], share["hashed"], strict=True):
                        copies.setdefault(index, set()).add(hashed)
        stable = all(len(hashed) == 1 for copies in known for hashed in copies.values())
        both = [i for a, b in combinations(known, 2) for i in a.keys() & b.keys()]
        text = "of different data: is it made, shuffled or split without a seed?"
        if shared and len(split) > 1:
            self.say(
                "wrong", epochs[0][0], f"the ranks' Subsets are parts {text}", "your_project.md"
            )
        elif shared and stable and both:
            if any(a.get(i) != b.get(i) for a, b in combinations(known, 2) for i in both):
                text = f"sample {both[0]} is another one on each rank: they take shards {text}"
                self.say("wrong", epochs[0][0], text, "your_project.md#what-to-check")
            else:
                self.say("ok", None, "each sample is the same on all ranks")
        elif shared:
            text = "whether a sample is the same on all ranks: too few have come to two"
            self.say("unseen", None, text)

    def look_at_order(self, first, second):
        length = min(len(first["indices"]), len(second["indices"]))
        if length < 4 or None in first["indices"]:
            self.say("unseen", None, "the order of the samples: they have no indices")
        elif first["indices"][:length] != second["indices"][:length]:
            self.say("ok", None, "the order of the samples differs from epoch to epoch")
        elif first["shuffle"]:
            text = "each epoch has the same order: set_epoch is not called before it"
            self.say("wrong", first, text, "multigpu.md#the-sampler")
        else:
            text = "each epoch has the same order: the samples are not shuffled"
            self.say("look", first, text, "multigpu.md#the-sampler")

    # What a step pays, and its random numbers

    def look_at_costs(self, run):
        steps = run.steps[0][1:]
        lines = Counter(line for step in steps for line in step["waits"])
        for line, times in lines.items():
            if times >= 0.9 * len(steps) > 3:
                text = "waits in each step until the GPU is done: .item() or the like"
                self.say("look", {"place": line}, text, "multigpu.md")
        if steps and all(s["backwards"] > 1 and s["synced"] == s["backwards"] for s in steps):
            text = (
                f"DDP averages {steps[0]['synced']} times in a step: use no_sync but for the last"
            )
            self.say("look", steps[0], text, "recipes/gradient_accumulation.md")
        for ranks in zip(*run.steps, strict=False):
            if ranks[0]["dropout"] and len({s["random_state"] for s in ranks}) < len(ranks):
                text = "all ranks draw the same random numbers, so that they drop the same units"
                self.say("look", ranks[0], text, "multigpu.md")
                break

    # What it saves

    def look_at_saves(self, run):
        saves = [[e for e in events if "saved" in e] for events in run.processes]
        paths = Counter(path for events in saves for path in {e["saved"] for e in events} - {""})
        self.saves = [event for events in saves for event in events]
        if not self.saves:
            self.say("unseen", None, "what it saves: in these steps, torch.save is not called")
            return
        shared = [path for path, count in paths.items() if count > 1]
        if shared:
            event = next(e for e in self.saves if e["saved"] == shared[0])
            text = f"{paths[shared[0]]} ranks write {Path(shared[0]).name}, one over the other's"
            self.say("wrong", event, text, "multigpu.md")
        again = [
            b
            for events in saves
            for path in paths
            for a, b in pairwise([e for e in events if e["saved"] == path])
            if b["inode"] is not None and a["inode"] in (None, b["inode"])
        ]
        if again:
            text = "overwrites the snapshot in place: a kill while it saves leaves none"
            kind = "wrong" if len(paths) == 1 else "look"
            self.say(kind, again[0], text, "singlegpu.md#saving-a-snapshot")
        elif not shared:
            self.say("ok", None, "one rank writes each file that is saved, and not over an old one")
        for event in self.saves:
            if event["prefixes"]:
                text = f"the names of the weights begin with {event['prefixes'][0]}"
                self.say("look", event, text, "your_project.md#using-the-trained-model")

    # Killed, and started again

    def look_at_kills(self, run):
        total = max(map(len, run.steps))
        times = sorted({e["at"] for e in self.saves if 0 < e["at"] < total - 1})
        if self.args.no_kill or not times:
            why = "" if self.args.no_kill else ": it does not save before its last step here"
            self.say("unseen", None, f"whether it survives a kill{why}")
            return
        first = next(e for e in self.saves if e["at"] == times[0])
        at = (times[0] + [*times, total][1] + 1) // 2  # in the middle between two saves
        whole = self.run(self.folder / "whole", AUDIT_SEED="7")
        killed = self.run(self.folder / "killed", AUDIT_SEED="7", AUDIT_SIGNAL=f"{at} 9")
        again = self.run(self.folder / "killed", self.args.resume, AUDIT_SEED="7")
        digests = [[step["digest"] for step in r.steps[0]] for r in (whole, killed)]
        if digests[0][: len(digests[1])] != digests[1]:
            self.say("unseen", None, "whether it resumes: two runs with the same seed differ")
        elif not again.steps:
            last = " / ".join(again.lines()[-2:]) or again.hangs
            text = f"killed in step {at + 1}, and started again, it makes no step: {last}"
            self.say("wrong", first, text, "singlegpu.md")
        else:
            self.compare_resumed(whole.steps, again.steps, at, first, again)
        self.look_at_sigterm(whole, at)

    def compare_resumed(self, whole, again, at, save, run):
        digests = [step["digest"] for step in whole[0]]
        begun = f"killed in step {at + 1}, and started again, it"
        load = next((event for event in run.events if "loaded_to" in event), save)
        start = again[0][0]["digest"]
        if start == digests[0]:
            text = f"{begun} begins from the start, though it has saved: does it need --resume?"
            self.say("look", save, text, "singlegpu.md#resuming")
            return
        if start not in digests[: at + 1]:
            text = f"{begun} begins with weights that it never had"
            self.say("look", load, text, "singlegpu.md#resuming")
            return
        number = len(digests[: at + 1]) - 1 - digests[at::-1].index(start)
        pairs = list(zip(again[0], whole[0][number:], strict=False))
        differ = next((i for i, (a, b) in enumerate(pairs) if a["digest"] != b["digest"]), None)
        text = f"{begun} resumes after step {number}"
        if differ is None:
            self.say("ok", None, f"{text}, and trains as a run without a kill")
            return
        samples = [step["samples"] for step in whole[0]]
        repeats = samples.index(again[0][0]["samples"]) if again[0][0]["samples"] in samples else -1
        if again[0][0]["stateful"] < whole[0][number]["stateful"]:
            text += ", but its optimizer begins anew: save and load its state"
            self.say("wrong", load, text, "singlegpu.md#saving-a-snapshot")
        if any(a["samples"] != b["samples"] for a, b in pairs):
            text = f"{begun} resumes after step {number}, with other samples than without a kill"
            if 0 <= repeats < number and again[0][0]["samples"]:
                text = f"{begun} takes the samples of step {repeats + 1} with the weights of step"
                text += f" {number}: {number - repeats} steps are trained twice"
            self.say("look", load, text, "resumable.md")
        elif again[0][0]["stateful"] == whole[0][number]["stateful"]:
            text += (
                f", takes the same samples, and differs after {differ} steps: what is not saved?"
            )
            self.say("look", load, text, "your_project.md#what-to-check")

    def look_at_sigterm(self, whole, at):
        stopped = self.run(self.folder / "stopped", AUDIT_SIGNAL=f"{at} 15")
        saves = [event["at"] for event in stopped.events if "saved" in event and event["at"] >= at]
        if stopped.hangs:
            self.say("wrong", None, f"after SIGTERM: {' '.join(stopped.hangs.split())}", "hangs.md")
        elif len(stopped.steps[0]) >= len(whole.steps[0]):
            self.say("look", None, "SIGTERM does not end it", "preemptible.md")
        elif saves:
            self.say(
                "ok", None, f"SIGTERM in step {at + 1}: it saves after {saves[0]} steps, and ends"
            )
        else:
            text = "SIGTERM ends it without a save: the steps since the last one are lost"
            self.say("look", None, text, "preemptible.md")
