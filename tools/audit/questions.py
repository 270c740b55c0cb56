"""What tools.audit asks of a script, and how it starts it.

"wrong" is said only of what no right script does; of what a right one may do, "look".
"""

import re
import shlex
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.judge.run import Run
from tools.launch.jobs import Shell, free_port
from tools.steps import ROOT
from tools.watch.record import launcher

PATHS = [str(ROOT / "tools" / part) for part in ("audit/inside", "witness")]
START = """
import os, sys
for name in {unset}:
    os.environ.pop(name, None)
sys.argv[0] = {script!r}
sys.path[:1] = {paths}
import runpy, audit_inside
audit_inside.install()
runpy.run_path({script!r}, run_name="__main__")
"""
OF_TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
TALKS = r"reduce|gather|broadcast|send|scatter|[sS]hard|[pP]arallel"  # a script with one of these
ROUNDING = 1e-4  # of a gradient's product, relative to the largest


class CannotRunError(Exception):
    """What a script has printed that makes no step."""


class Finding(NamedTuple):
    kind: str  # wrong, look, ok or unseen
    place: str
    text: str
    page: str = ""


def sources(script):
    """Returns the text of a script and of the files beside it that it imports."""
    paths = [script]
    for path in paths:  # which grows
        for name in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M):
            found = script.with_name(f"{name}.py")
            if found.is_file() and found not in paths:
                paths.append(found)
    return "\n".join(path.read_text() for path in paths)


def close(found, expected, scale):
    return all(abs(a - b) <= ROUNDING * scale for a, b in zip(found, expected, strict=True))


def same(a, b):
    """Whether two steps have the same weights, but for rounding: DDP's first buckets are others."""
    near = abs(a["weights"] - b["weights"]) <= ROUNDING / 10 * max(1, abs(b["weights"]))
    pairs = [pair for pair in zip(a["used"], b["used"], strict=False) if None not in pair]
    scale = max((abs(x) for pair in pairs for x in pair), default=0)
    return a["digest"] == b["digest"] or (near and all(close([x], [y], scale) for x, y in pairs))


def one_line(text):
    return " ".join(text.split())


def rank_of(events):
    return max(event["rank"] for event in events)


class Audit:
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.shell = Shell(folder)
        self.text = sources(args.script)
        self.launcher = args.launcher or launcher(self.text, args.ranks).split()[0]
        self.gpus = "cuda" in self.text or "accelerator" in self.text
        self.findings = []

    def say(self, kind, event, text, page=""):
        """Keeps a finding, once; `event` has its place in the script."""
        finding = Finding(kind, event["place"] if event else "", text, page)
        if finding not in self.findings:
            self.findings.append(finding)

    def run(self, name, more="", **variables):
        """Starts the script in a folder of this name; returns its run."""
        events = Path(tempfile.mkdtemp(dir=self.folder))
        script = str(self.args.script)
        starts_ranks = self.launcher == "python"
        paths = [str(self.args.script.parent), *PATHS]
        unset = OF_TORCHRUN.split() if starts_ranks else []
        (events / "start.py").write_text(START.format(script=script, paths=paths, unset=unset))
        variables = {
            "AUDIT_SIGNAL": "-1 0",
            "AUDIT_STEPS": str(self.args.steps),
            "AUDIT_SECONDS": str(self.args.seconds),
            "AUDIT_PORT": str(free_port()) if starts_ranks else "",
            "AUDIT_GPUS": str(self.args.ranks // self.args.nodes) if self.gpus else "",
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "WITNESS_FOLDER": str(events),
            **variables,
        }
        count = 1 if starts_ranks else self.args.ranks
        nodes = [rank * self.args.nodes // count for rank in range(count)]
        folders = [self.folder / f"{name}{node}" for node in nodes]
        (self.folder / name).mkdir(exist_ok=True)  # which the nodes share
        for folder in {*folders} - {*self.folder.iterdir()}:
            folder.symlink_to(self.folder / name)
        arguments = f"{shlex.join(self.args.arguments)} {more}"
        job = self.shell.ranks_on(folders, f"{events}/start.py {arguments}", **variables)
        run = Run([job], events, self.args.script)
        run.limited = (events / "limited").exists()
        return run

    def ask(self):
        run = self.run("first")
        if not run.steps and self.gpus and "is_available" in self.text:
            self.gpus = False  # it can do without
            on_gpus, run = run, self.run("without")
            if not run.steps:
                run = on_gpus
            elif on_gpus.lines():
                error = one_line(on_gpus.lines()[-1])
                self.say("look", None, f"it runs on CPUs, but not on pretended GPUs: {error}")
        never = [event for event in run.events if "no_gradient" in event]
        if run.hangs and not run.steps and len(set(re.findall(r"in line \d+", run.hangs))) < 2:
            raise CannotRunError(run.hangs)  # it may still prepare its data
        if not (run.steps or run.hangs or never):
            raise CannotRunError("\n".join(run.lines()[-12:]) or "It has printed nothing.")
        self.look_at_end(run)
        if run.steps:
            self.look_at_ranks(run)
            self.look_at_steps(run)
            self.look_at_data(run)
            self.look_at_saves(run)
        elif never:
            text = "no backward pass comes to the weights that the optimizer has"
            self.say("wrong", never[0], text, "singlegpu.md")
        return self.findings

    def look_at_end(self, run):
        if run.hangs:
            self.say("wrong", None, one_line(run.hangs), "hangs.md")
        elif run.limited:
            self.say("unseen", None, "how it ends: --steps or --seconds end it before")
        elif any(run.statuses):
            errors = [line for line in run.lines() if re.search(r"Error|what\(\)", line)]
            error = one_line((errors or run.lines() or [""])[-1])
            kind = "look" if self.gpus and re.search("cuda", error, re.I) else "wrong"
            self.say(kind, None, f"it fails: {error}", "errors.md")
        else:
            self.say("ok", None, "it ends, with status 0")
            if sum("joined" in e for e in run.events) > sum("left" in e for e in run.events):
                self.say("look", None, "destroy_process_group is not called", "multigpu.md")

    def look_at_ranks(self, run):
        self.ranks = len(run.steps)
        first = run.steps[0][0]
        if self.ranks > 1 and first["world_size"] == 1:
            text = f"{self.ranks} processes train, each alone: none has joined a process group"
            self.say("wrong", first, text, "multigpu.md#the-process-group")
        elif self.ranks < first["world_size"] or (self.ranks == 1 and "spawn(" in self.text):
            self.say("look", first, f"of {self.args.ranks} ranks, {self.ranks} train")
        used = [{e["gpu"] for e in events if "gpu" in e} for events in run.processes]
        used = [numbers for numbers in used if numbers]
        if len(used) > 1 == self.args.nodes == max(map(len, used)):
            page = "multigpu.md#the-process-group"
            current = {steps[0]["current_gpu"] for steps in run.steps}
            if len(set.union(*used)) < len(used):
                text = f"{len(used)} ranks use cuda:{used[0].pop()}: set_device is missing"
                self.say("wrong", first, text, page)
            elif current != set.union(*used):
                text = "set_device is missing: collectives of objects, and barriers, use cuda:0"
                self.say("look", first, text, page)
            else:
                self.say("ok", None, "each rank uses a GPU of its own")

    def look_at_steps(self, run):
        """Looks at gradients and weights, for each optimizer."""
        self.parallel = False  # whether the ranks train one model, each on data of its own
        by_rank = []
        for steps in run.steps:
            keys = dict.fromkeys(step["optimizer"] for step in steps)
            by_rank.append([[s for s in steps if s["optimizer"] == key] for key in keys])
        for ranks in zip(*by_rank, strict=False):
            steps = list(zip(*ranks, strict=False))
            kinds = {self.kind_of_gradient(step) for step in steps}
            self.parallel |= bool({"mean", "sum"} & kinds)
            self.parallel |= all(step["ddp"] or step["fsdp"] for step in steps[0])
            self.look_at_learning(steps)
            if kinds == {"sum"}:
                text = "gradients are summed over the ranks: right if the loss is divided by them"
                self.say("look", steps[0][0], text, "your_project.md#losses-that-are-no-plain-mean")
            if steps[0][0]["sharded"]:
                self.say("unseen", None, "whether the ranks' weights agree: they are sharded")
            elif self.ranks > 1:
                self.look_at_weights(steps, kinds)
        self.look_at_costs(run)

    def kind_of_gradient(self, step):
        """Says what the ranks' gradients are: the mean or the sum of their own, or neither."""
        own, used = [s["own"] for s in step], [s["used"] for s in step]
        if len({len(products) for products in own}) > 1:  # they hold parts of the model
            return "other"
        known = [i for i, values in enumerate(zip(*own, *used, strict=True)) if None not in values]
        own, used = ([[values[i] for i in known] for values in v] for v in (own, used))
        scale = max((abs(x) for values in own for x in values), default=0)
        total = [sum(values) for values in zip(*own, strict=True)]
        square = sum(x * x for x in total)
        if square <= (ROUNDING * scale) ** 2 or all(close(o, own[0], scale) for o in own):
            return "unknown"
        factor = sum(a * b for a, b in zip(used[0], total, strict=True)) / square  # by clipping
        if factor > 0 and all(close(u, [factor * x for x in total], scale) for u in used):
            return "sum" if abs(factor - 1) < ROUNDING else "mean"
        return "other"

    def look_at_learning(self, steps):
        first = steps[0][0]
        page = "singlegpu.md"
        if any(s["weights"] != s["weights"] for s in steps[-1]):
            self.say("wrong", first, "the weights become NaN", "recipes/verify.md")
        elif not any(s["largest"] for ranks in steps for s in ranks):
            self.say("wrong", first, "all gradients are 0 in every step: nothing is learned", page)
        elif len(steps) > 2 and self.never_cleared(steps[:4]):
            text = "gradients add up from step to step: zero_grad is missing"
            self.say("wrong", first, text, page)
        elif len({ranks[0]["digest"] for ranks in steps}) == 1 < len(steps):
            self.say("look", first, "the weights never change: is the learning rate 0?", page)
        else:
            self.say("ok", None, "gradients change the weights")
        for (before, *_), (after, *_) in pairwise(steps):
            if before["training"] and not after["training"]:
                text = "the model goes on training in eval mode: train() is missing"
                self.say("look", after, text, "recipes/evaluate.md")

    @staticmethod
    def never_cleared(steps):
        """Whether a step's gradient is the last one's and the mean of the ranks' own together."""
        every = [s for ranks in steps for s in ranks]
        if len({len(s["own"]) for s in every}) > 1 or any(
            None in s["own"] + s["used"] for s in every
        ):
            return False
        used = [ranks[0]["used"] for ranks in steps]
        own = [zip(*(s["own"] for s in ranks), strict=True) for ranks in steps]
        own = [[sum(values) / len(values) for values in means] for means in own]
        scale = max(abs(x) for values in own for x in values)
        added = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(used)]
        later = list(zip(used[1:], added, own[1:], strict=True))
        return not any(close(u, o, scale) for u, _, o in later) and all(
            close(a, o, scale) for _, a, o in later
        )

    def look_at_weights(self, steps, kinds):
        equal = [len({s["digest"] for s in ranks}) == 1 for ranks in steps]
        if all(equal):
            self.parallel = True
            self.say("ok", None, "all ranks have the same weights before each step")
            return
        number = equal.index(False)
        place = steps[max(number - 1, 0)][0]
        when = f"after step {number}" if number else "before the first step"
        text = f"{when}, the ranks have different weights"
        page = "multigpu.md"
        if any(equal[number + 1 :]):
            self.say("look", place, f"{text}: right only if they are averaged later", page)
        elif all(step["ddp"] for step in steps[0]):
            self.say("wrong", place, f"{text}: is the model called without its DDP wrapper?", page)
        elif kinds <= {"mean", "sum", "unknown"} and kinds != {"unknown"}:
            self.say("wrong", place, f"{text}: all must begin with those of rank 0", page)
        elif not re.search(TALKS, self.text):
            self.say("wrong", place, f"{text}: nothing averages their gradients", page)
        else:
            self.say("look", place, f"{text}: right only if each has a part of the model", page)

    def look_at_costs(self, run):
        steps = run.steps[0][1:]
        for line, count in Counter(line for step in steps for line in step["waits"]).items():
            if self.gpus and count >= 0.9 * len(steps) > 3:
                text = "item() in each step: the CPU waits until the GPU is done"
                self.say("look", {"place": line}, text, "multigpu.md")
        for ranks in zip(*run.steps, strict=False):
            states = {step["random_state"] for step in ranks}
            if self.parallel and ranks[0]["dropout"] and len(states) < len(ranks):
                text = "two ranks have the same random numbers, so that they drop the same units"
                self.say("look", run.steps[0][0], text, "multigpu.md")

    # Data

    @staticmethod
    def epochs(events):
        """Returns the iterators of DataLoaders that a process has trained with, in their order."""
        found, kept = {}, []
        for event in [event for event in events if "iterator" in event]:
            if "size" in event:
                found[event["iterator"]] = event | {"indices": [], "hashed": []}
                kept.append(found[event["iterator"]])
            elif "indices" in event:
                kept_lists = found[event["iterator"]]
                kept_lists["indices"] += event["indices"]
                kept_lists["hashed"] += event["hashed"]
            else:
                found[event["iterator"]] |= event | {"place": found[event["iterator"]]["place"]}
        return [epoch for epoch in kept if "trains" in epoch]

    def look_at_data(self, run):
        trained = [events for events in run.processes if any("samples" in e for e in events)]
        by_rank = [self.epochs(events) for events in sorted(trained, key=rank_of)]
        epochs = list(zip(*by_rank, strict=False))
        samples = [[s["samples"] for s in ranks] for ranks in zip(*run.steps, strict=False)]
        distinct = {sample for ranks in samples for sample in ranks[0]}
        if any(share["shares"] not in (None, self.ranks) for share in by_rank[0]):
            self.say("unseen", None, "whose samples are whose: some ranks share a model")
        elif self.parallel and self.ranks > 1:
            if all(ranks[0] == other for ranks in samples for other in ranks) and len(distinct) > 1:
                text = f"all {self.ranks} ranks train on the same samples"
                place = epochs[0][0] if epochs else run.steps[0][0]
                self.say("wrong", place, text, "multigpu.md#what-happens-without-the-sampler")
            else:
                self.look_at_shards([shares for shares in epochs if "ended" in shares[0]])
                self.look_at_copies(epochs[0] if epochs else [])
        if len(by_rank[0]) > 1:
            self.look_at_order(*by_rank[0][:2])

    def look_at_shards(self, epochs):
        """Looks whether the ranks' shares of an epoch overlap, and whether samples are missing."""
        page = "multigpu.md#what-happens-without-the-sampler"
        for shares in epochs:
            hashed = [set(share["hashed"]) for share in shares]
            several = sum(map(len, hashed)) - len(set.union(*hashed))
            missing = shares[0]["size"] - len({i for share in shares for i in share["indices"]})
            if any(len(h) < len(share["hashed"]) for h, share in zip(hashed, shares, strict=True)):
                continue  # some samples have the same content
            if hashed[0] and all(h == hashed[0] for h in hashed):
                text = f"each rank trains on all {len(hashed[0])} samples of an epoch"
                self.say("wrong", shares[0], text, page)
            elif several >= len(shares):
                text = f"in an epoch, {several} samples come to several ranks"
                self.say("look", shares[0], text, page)
            elif missing > 0 and shares[0]["shuffle"] is not None:
                self.say(
                    "look", shares[0], f"{missing} samples do not come in an epoch: drop_last?"
                )
            else:
                self.say("ok", None, "in an epoch, each sample comes to one rank")

    def look_at_copies(self, shares):
        """Looks whether a data set is the same on all ranks, where they draw from the same one."""
        found = {share["sample"] for share in shares}
        if not shares or any(share["shuffle"] is None for share in shares):
            return  # without a DistributedSampler, a rank may have data of its own
        if "" in found:
            self.say("unseen", None, "whether a sample is the same on all ranks")
        elif len(found) > 1:
            text = "sample 0 is not the same on all ranks: each makes, splits or shuffles its data"
            self.say("wrong", shares[0], text, "your_project.md#what-to-check")
        else:
            self.say("ok", None, "sample 0 is the same on all ranks")

    def look_at_order(self, first, second):
        length = min(len(first["indices"]), len(second["indices"]))
        if length < 4 or None in first["indices"]:
            return
        if first["indices"][:length] != second["indices"][:length]:
            self.say("ok", None, "the order of the samples differs from epoch to epoch")
        else:
            text = "each epoch has the same order: "
            text += (
                "set_epoch is not called" if first["shuffle"] else "the samples are not shuffled"
            )
            kind = "wrong" if first["shuffle"] else "look"
            self.say(kind, first, text, "multigpu.md#what-happens-without-the-sampler")

    # Snapshots

    def look_at_saves(self, run):
        by_process = [[e for e in events if e.get("saved")] for events in run.processes]
        saves = [save for saves in by_process for save in saves]
        writers = Counter(path for saves in by_process for path in {s["saved"] for s in saves})
        for save in saves:
            name = Path(save["saved"]).name
            if writers[save["saved"]] > 1:
                text = f"{writers[save['saved']]} ranks write {name}, one over the other's"
                self.say("wrong", save, text, "multigpu.md#logging-and-saving-on-one-rank")
        for of_process in by_process:
            for path in writers:
                pairs = pairwise(save for save in of_process if save["saved"] == path)
                over = any(b["inode"] and a["inode"] in (None, b["inode"]) for a, b in pairs)
                if over and Path(path).is_file():
                    text = "writes over the last snapshot: killed meanwhile, it leaves none"
                    save = next(save for save in saves if save["saved"] == path)
                    size = Path(path).stat().st_size
                    beside = [file.stat().st_size for file in Path(path).parent.iterdir()]
                    kind = "look" if len([n for n in beside if n > size / 2]) > 1 else "wrong"
                    self.say(kind, save, text, "singlegpu.md#saving-a-snapshot")
        total = len(run.steps[0])
        if saves and not run.limited and saves[-1]["at"] < total:
            text = f"its last save comes after {saves[-1]['at']} of {total} steps"
            self.say("look", saves[-1], text, "singlegpu.md#the-training-loop")
        times = sorted({save["at"] for save in saves if 0 < save["at"] < total - 1})
        if self.args.no_kill or not times:
            text = "how it survives a kill: torch.save is not called before the last step here"
            self.say("unseen", None, "how it survives a kill" if self.args.no_kill else text)
        else:
            self.kill_and_resume(next(s for s in saves if s["at"] == times[0]), [*times, total][1])

    def kill_and_resume(self, save, next_save):
        at = (save["at"] + next_save + 1) // 2
        whole = self.run("whole", AUDIT_SEED="7")
        killed = self.run("killed", AUDIT_SEED="7", AUDIT_SIGNAL=f"{at} 9")
        again = self.run("killed", self.args.resume, AUDIT_SEED="7")
        digests = [step["digest"] for step in whole.steps[0]]
        if not all(map(same, killed.steps[0], whole.steps[0])):
            self.say("unseen", None, "how it survives a kill: two runs with the same seed differ")
        elif not again.steps:
            printed = one_line(" ".join(again.lines()[-3:]))
            text = f"killed in step {at + 1} and started again, it makes no step: {printed}"
            loads = any("loaded_to" in event for event in again.events)
            self.say("wrong" if loads else "look", save, text, "singlegpu.md")
        else:
            self.compare(whole.steps[0], again, at, save)
        stopped = self.run("stopped", AUDIT_SIGNAL=f"{at} 15")
        saved = [e["at"] for e in stopped.events if "saved" in e and e["at"] >= at]
        page = "preemptible.md"
        if stopped.hangs:
            self.say("wrong", None, f"after SIGTERM: {one_line(stopped.hangs)}", page)
        elif saved and "gloo/" in stopped.output:
            text = "after SIGTERM, a rank stops, and another fails in a collective"
            self.say("wrong", None, text, page)
        elif saved and len(stopped.steps[0]) < len(digests):
            self.say("ok", None, f"SIGTERM in step {at + 1}: it saves after {saved[0]}, and ends")
        else:
            self.say("look", None, "at SIGTERM, nothing is saved", page)

    def compare(self, whole, again, at, save):
        """Compares the steps after a kill with those of a run without one."""
        steps = again.steps[0]
        load = next((event for event in again.events if "loaded_to" in event), save)
        started = f"killed in step {at + 1} and started again, it"
        numbers = [n for n, s in enumerate(whole[: at + 1]) if s["digest"] == steps[0]["digest"]]
        page = "singlegpu.md#loading-a-snapshot"
        if len(numbers) > 1:
            if load is not save or len(steps) < len(whole):
                self.say("unseen", None, "where it resumes: its weights do not change")
                return
            numbers = [0]
        if not numbers or numbers == [0]:
            what = "begins from scratch" if numbers else "begins with weights that it never had"
            self.say("look", load, f"{started} {what}: does it need --resume?", page)
            return
        if self.gpus and load.get("loaded_to") == "None":
            text = "torch.load without map_location: each rank loads onto the GPU that has saved"
            self.say("look", load, text, page)
        pairs = list(zip(steps, whole[numbers[-1] :], strict=False))
        repeated = [n for n, s in enumerate(whole) if s["samples"] == steps[0]["samples"] != []]
        if steps[0]["stateful"] < pairs[0][1]["stateful"]:
            text = "the snapshot lacks the optimizer's state, or it is not loaded"
            self.say("wrong", load, f"{started} has no momentum or the like: {text}", page)
        if all(same(a, b) for a, b in pairs):
            text = f"{started} resumes after step {numbers[-1]}, and trains as without a kill"
            self.say("ok", None, text)
        elif any(a["samples"] != b["samples"] for a, b in pairs):
            text = f"{started} takes other samples than without a kill"
            if repeated and repeated[0] < numbers[-1]:
                text = f"{started} has the weights of step {numbers[-1]}, and takes again the"
                text += f" samples of step {repeated[0] + 1} and those that follow"
            self.say("look", load, text, "resumable.md")
        elif steps[0]["stateful"] == pairs[0][1]["stateful"]:
            text = f"{started} takes the same samples, but differs: what else does it keep?"
            self.say("look", load, text, "your_project.md#what-to-check")
