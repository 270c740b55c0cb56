"""Starts a script for tools.audit, and asks how it ends and what each rank does.

"wrong" is said only of what no right script does; of what a right one may do, "look".
"""

import re
import shlex
import tempfile
from pathlib import Path
from typing import NamedTuple

from tools.audit.data import Data
from tools.audit.snapshots import Snapshots, one_line
from tools.audit.training import Training
from tools.judge.run import Run
from tools.launch.jobs import Shell, free_port
from tools.steps import ROOT
from tools.watch.record import launcher, sources

PATHS = [str(ROOT / "tools" / part) for part in ("audit/inside", "witness")]
START = """
import os, sys
for name in {unset}:
    os.environ.pop(name, None)
sys.argv[0] = {script!r}
sys.path[:1] = {paths}
import runpy, _audit_inside
_audit_inside.install()
runpy.run_path({script!r}, run_name="__main__")
"""
OF_TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT"
DIVERGE = "recipes/verify.md#what-makes-ranks-diverge"
GROUP = "multigpu.md#the-process-group"


class CannotRunError(Exception):
    """What a script has printed that makes no step."""


class Finding(NamedTuple):
    kind: str  # wrong, look, ok or unseen
    place: str
    text: str
    page: str = ""


class Audit(Training, Data, Snapshots):
    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.shell = Shell(folder, as_in_life=True)
        self.text = sources(args.script)
        self.launcher = args.launcher or launcher(self.text, args.ranks).split()[0]
        self.gpus = "cuda" in self.text or "accelerator" in self.text
        self.findings = []
        self.started = []  # the runs so far
        self.unordered = False  # whether parameters have another order in each process
        self.whole = None  # one with a seed

    def say(self, kind, event, text, page=""):
        """Keeps a finding, once; `event` has its place in the script."""
        finding = Finding(kind, event["place"] if event else "", text, page)
        if finding not in self.findings:
            self.findings.append(finding)

    def run(self, name, more="", ranks=None, **variables):
        """Starts the script in a folder of this name; returns its run."""
        ranks = ranks or self.args.ranks
        events = Path(tempfile.mkdtemp(dir=self.folder))
        script = str(self.args.script)
        paths = [str(self.args.script.parent), *PATHS]
        unset = OF_TORCHRUN.split() if self.launcher == "python" else []
        (events / "start.py").write_text(START.format(script=script, paths=paths, unset=unset))
        variables = self.variables(ranks, events) | variables
        folders = self.folders(name, 1 if unset else ranks)
        arguments = f"{shlex.join(self.args.arguments)} {more}"
        job = self.shell.ranks_on(folders, f"{events}/start.py {arguments}", **variables)
        run = Run([job], events, self.args.script, 2 * self.args.seconds)
        run.limited = (events / "limited").exists()
        run.home = self.folder / name
        self.started.append(run)
        for kind, text, place in self.started[0].differences(run):
            self.unordered |= "parameter" in kind
            by_name = "distributed.checkpoint" in self.text and "optimizer" in kind
            self.say("look" if by_name else "wrong", {"place": place}, text, DIVERGE)
        return run

    def whole_run(self, keep=""):
        """Runs the script with a seed, once; the batches of step `keep` are kept."""
        self.whole = self.whole or self.run("whole", AUDIT_SEED="7", AUDIT_KEEP=keep)
        return self.whole

    def variables(self, ranks, events):
        return {
            "AUDIT_KEEP": "",
            "AUDIT_SIGNAL": "-1 0",
            "AUDIT_STEPS": str(self.args.steps),
            "AUDIT_SECONDS": str(self.args.seconds),
            "AUDIT_PORT": str(free_port()) if self.launcher == "python" else "",
            "AUDIT_GPUS": str(max(1, ranks // self.args.nodes)) if self.gpus else "",
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "WITNESS_FOLDER": str(events),
        }

    def folders(self, name, count):
        """Returns a folder for each process, one per node, which are links to the same one."""
        nodes = [rank * self.args.nodes // count for rank in range(count)]
        folders = [self.folder / f"{name}{node}" for node in nodes]
        (self.folder / name).mkdir(exist_ok=True)
        for folder in {*folders} - {*self.folder.iterdir()}:
            folder.symlink_to(self.folder / name)
        return folders

    def ask(self):
        run = self.first_run()
        never = [event for event in run.events if "no_gradient" in event]
        wrong = any(finding.kind == "wrong" for finding in self.findings)
        waits = len(set(re.findall(r"in line \d+", run.hangs)))
        if run.hangs and not (run.steps or wrong) and waits < 2:
            raise CannotRunError(run.hangs)  # it may still prepare its data
        if not (run.steps or run.hangs or never or wrong):
            raise CannotRunError("\n".join(run.lines()[-12:]) or "It has printed nothing.")
        self.look_at_end(run)
        saved = [Path(event["saved"]).resolve() for event in run.events if event.get("saved")]
        self.outside = [path for path in saved if not path.is_relative_to(run.home.resolve())]
        if run.steps:
            self.look_at_ranks(run)
            self.look_at_steps(run)
            self.look_at_data(run)
            self.look_at_log(run)
            if self.parallel and self.ranks > 1 and not (self.args.no_kill or self.outside):
                self.look_at_one_process(run)
            self.look_at_saves(run)
        elif never:
            text = "no backward pass comes to the weights that the optimizer has"
            self.say("wrong", never[0], text, "singlegpu.md")
        return self.findings

    def first_run(self):
        """Runs the script on pretended GPUs, or without, if it can do so only."""
        run = self.run("first")
        if run.steps or not self.gpus or "is_available" not in self.text:
            return run
        self.gpus = False
        without = self.run("without")
        if not without.steps:
            return run
        if run.lines():
            error = one_line(run.lines()[-1])
            self.say("look", None, f"it runs on CPUs, but not on pretended GPUs: {error}")
        return without

    def look_at_end(self, run):
        if run.hangs:
            kind = "unseen" if run.is_long else "wrong"
            self.say(kind, None, one_line(run.hangs), "hangs.md")
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
            self.say("wrong", first, text, GROUP)
        elif self.ranks < first["world_size"] or (self.ranks == 1 and "spawn(" in self.text):
            self.say("look", first, f"of {self.args.ranks} ranks, {self.ranks} train")
        used = [{e["gpu"] for e in events if "gpu" in e} for events in run.processes]
        used = [numbers for numbers in used if numbers]
        if len(used) > 1 == self.args.nodes == max(map(len, used)):
            self.look_at_gpus(first, used, {steps[0]["current_gpu"] for steps in run.steps})

    def look_at_gpus(self, first, used, current):
        if len(set.union(*used)) < len(used):
            text = f"{len(used)} ranks use cuda:{used[0].pop()}: set_device is missing"
            self.say("wrong", first, text, GROUP)
        elif current != set.union(*used):
            text = "set_device is missing: collectives of objects, and barriers, use cuda:0"
            self.say("look", first, text, GROUP)
        else:
            self.say("ok", None, "each rank uses a GPU of its own")
