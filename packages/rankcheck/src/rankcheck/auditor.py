"""Starts a script, and asks all questions of what it does.

It is an error only if no right script does it; what a right one may do is a warning.
"""

import os
import shlex
import tempfile
import time
import traceback
from pathlib import Path

from rankcheck import CannotRunError, folder
from rankcheck.launch.jobs import STARTUP, Shell, free_port
from rankcheck.launch.run import Run, start_observed
from rankcheck.launch.scripts import launcher, sources
from rankcheck.progress import Progress
from rankcheck.questions import data, ends, log, nodes, one_process, restarts, snapshots, training
from rankcheck.questions.facts import Facts, error, one_line, unseen, warning

OBSERVER = Path(__file__).with_name("inside.py")
DIFFERENCES = {"order": "RC111", "optimizer order": "RC111", "shape": "RC112", "targets": "RC209"}
REPORT = "(please report it)"
# What is asked of a run in which at least one rank makes a step, and of which notes.
QUESTIONS = (
    ("steps", ends.ranks),
    ("steps", training.gradients),
    ("steps", training.weights),
    ("costs", training.costs),
    ("data", ends.downloads),
    ("data", data.samples),
    ("data", data.order),
    ("data", data.random_numbers),
    ("data", data.evaluation),
    ("prints", log.losses),
    ("prints", log.scores),
    ("prints", log.runs),
    ("steps", one_process.gradient),
    ("steps", nodes.several),
    ("ends", ends.port),
    ("saves", snapshots.files),
    ("saves", restarts.kill),
    ("ends", ends.caught),
)


class AuditError(Exception):
    """An error of the audit itself, where it notes what a script does."""


class Audit:
    """Runs of one script, and what is found in them, in the order in which it is found."""

    def __init__(self, args, path):
        """Keeps all runs in the folder `path`."""
        self.args = args
        self.folder = path
        self.start_time = time.time()
        self.shell = Shell(path, as_in_life=True)
        self.links, self.left_out = ([], []) if args.empty else folder.visible(args.root)
        # Not what --keep has made here, which would hold a link to itself.
        self.links = [link for link in self.links if not path.is_relative_to(link.resolve())]
        self.links += [path.absolute() for path in args.data]
        self.text = sources(args.script)
        self.launcher = args.launcher or launcher(self.text)
        self.gpus = True  # whether they are pretended
        self.findings = []
        self.judged = False  # whether all questions were asked
        self.started = []  # the runs so far
        kills, replays = not args.no_kill, not args.no_replay
        self.progress = Progress(1 + 2 * (kills or replays) + replays + 7 * kills)

    def introduction(self):
        """Says how the script is started, and what it finds."""
        text = f"{self.args.script.name}, started as by {self.launcher}, on CPUs"
        text += ", in a copy of this folder" if self.links else ", in an empty folder"
        if left_out := [path.name for path in self.left_out if path.absolute() not in self.links]:
            text += f" without {', '.join(left_out)} (--data {left_out[0]} brings a snapshot along)"
        return text

    def say(self, finding):
        if finding not in self.findings:
            self.findings.append(finding)

    def start(self, name, *args, **options):
        """Starts the script in a folder of this name; returns its run."""
        run = self.start_once(name, *args, **options)
        raced = any("FileExistsError" in event.get("error", "") for event in run.events)
        # Two ranks may have made a folder at the same time: now it is there.
        return self.start_once(name, *args, **options) if raced and not run.steps else run

    def start_once(self, name, more="", ranks=None, gpus=None, nodes=None, **variables):
        ranks = ranks or self.args.ranks
        events = Path(tempfile.mkdtemp(prefix="events_", dir=self.folder))
        nodes = nodes or self.args.nodes
        gpus = gpus or max(1, ranks // nodes)
        variables = self.variables(events, gpus) | variables
        folders = self.folders(name, 1 if self.launcher == "python" else ranks, nodes)
        folder.link(self.links, self.args.root, self.folder / name)
        arguments = f"{shlex.join(self.args.arguments)} {more}".strip()
        self.tell(name, arguments, variables, ranks)
        job = start_observed(
            self.shell, folders, self.args.script, OBSERVER, arguments, self.launcher, **variables
        )
        tick = self.progress.tick
        run = Run([job], events, self.args.script, 2 * self.args.seconds, tick=tick)
        run.limited = (events / "limited").exists()
        run.home = self.folder / name
        self.started.append(run)
        if run.failures and len(self.started) > 1:
            raise AuditError(run.failures[0][1])
        # An optimizer loads by position, but for a distributed checkpoint; DDP averages by it.
        by_position = any("saved" in event and not event.get("folder") for event in run.events)
        of_ddp = any(event.get("ddp") for event in run.events if "order" in event)
        for kind, text, place in self.started[0].differences(run):
            certain = {"order": of_ddp, "optimizer order": by_position}.get(kind, True)
            say = error if certain else warning
            self.say(say(DIFFERENCES[kind], {"place": place}, text))
        return run

    def tell(self, name, arguments, variables, ranks):
        """Says which run begins, and keeps it in a list for --keep."""
        at, signum = map(int, variables["AUDIT_SIGNAL"].split())
        again = "started again after the kill"
        what = {
            "first": "all ranks",
            "without": "all ranks, without GPUs",
            "whole": "all ranks, with a seed",
            "calm": "all ranks, without dropout",
            "short": "all ranks, for a few steps",
            "raised": "an error in the first step",
            "alone": "one step, in one process",
            "nodes": "each rank on a node of its own",
            "killed": f"killed in step {at + 1}" if signum else again,
            "stopped": f"SIGTERM in step {at + 1}",
        }.get(name) or ("killed in a save" if "AUDIT_EVENT" in variables else again)
        self.progress.begin(what)
        script = f"-m {self.args.module}" if self.args.module else self.args.script
        start = self.launcher
        if start == "torchrun":
            start += f" --standalone --nproc_per_node={ranks}"
        with (self.folder / "runs.txt").open("a") as file:
            file.write(f"in {name}/: {start} {script} {arguments}  # {what}\n")

    def variables(self, events, gpus):
        return {
            "AUDIT_KEEP": "",
            "AUDIT_SIGNAL": "-1 0",
            "AUDIT_STEPS": str(self.args.steps),
            "AUDIT_SECONDS": str(self.args.seconds),
            "AUDIT_START": str(self.start_time),
            "AUDIT_PORT": str(free_port()) if self.launcher == "python" else "",
            "PRETEND_GPUS": str(gpus if self.gpus else 0),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "1",
            "WITNESS_FOLDER": str(events),
            "WITNESS_MODULE": self.args.module or "",
            "WITNESS_ROOT": str(self.args.root),
            **(self.of_commands() if self.launcher == "python" else {}),
        }

    def of_commands(self):
        """Returns the variables by which each Python that the script starts is observed."""
        paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), "STARTUP_OBSERVER": str(OBSERVER)}

    def interrupted(self, signal_name):
        self.judged = False
        self.say(unseen(f"the rest: {signal_name} ended it in run {self.progress.number}"))

    def end(self):
        self.progress.end()
        self.shell.end_all()

    def folders(self, name, count, nodes):
        """Returns a folder for each process, one per node, which are links to the same one."""
        folders = [self.folder / f"{name}{rank * nodes // count}" for rank in range(count)]
        (self.folder / name).mkdir(exist_ok=True)
        for link in {*folders} - {*self.folder.iterdir()}:
            link.symlink_to(self.folder / name)
        return folders

    def first_run(self):
        """Runs the script on pretended GPUs, or without, if it can do so only."""
        run = self.start("first")
        if run.steps or "is_available" not in self.text:
            return run
        self.gpus = False
        without = self.start("without")
        if not without.steps:
            return run
        if run.lines():
            text = f"it runs on CPUs, but not on pretended GPUs: {one_line(run.lines()[-1])}"
            self.say(warning("RC110", None, text))
        return without

    def ask(self):
        """Returns what is found; an error of a question is told as such."""
        facts = Facts(self.first_run(), self.args, self.start, self.launcher, self.text)
        if not facts.run.steps:
            self.ask_without_steps(facts)
            return self.findings
        self.answer("ends", ends.end, facts)
        failed = [text for subject, text in facts.run.failures if subject == "steps"]
        if failed:
            self.say(unseen(f"what its steps do: the audit failed in {failed[0]} {REPORT}"))
            return self.findings
        if ends.too_early(facts):
            text = "the rest: the run was ended before each rank had made a step; give it more"
            self.say(unseen(f"{text} than --seconds {self.args.seconds}"))
            return self.findings
        self.judged = not any(failure.is_refused for failure in facts.failures)
        for subject, question in QUESTIONS:
            self.answer(subject, question, facts)
        return self.findings

    def answer(self, subject, question, facts):
        """Asks a question, unless what it looks at was not noted because of an error of ours."""
        what = question.__doc__.partition("\n")[0].strip(".").replace("Whether", "whether")
        failed = [text for other, text in facts.run.failures if other == subject]
        if failed:
            self.judged = False
            self.say(unseen(f"{what}: the audit failed in {failed[0]} {REPORT}"))
            return
        try:
            for finding in question(facts):
                self.say(finding)
        except AuditError as caught:
            self.judged = False
            self.say(unseen(f"{what}: the audit failed in {caught} {REPORT}"))
        except Exception as caught:
            self.judged = False
            frame = traceback.extract_tb(caught.__traceback__)[-1]
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            text = f"the audit failed in {place}: {type(caught).__name__}: {caught} {REPORT}"
            self.say(unseen(f"{what}: {one_line(text)}"))

    def ask_without_steps(self, facts):
        run = facts.run
        failures = [text for _, text in run.failures] + [f.text for f in facts.failures if f.ours]
        if any(failure.of_cuda for failure in facts.failures):
            self.answer("ends", ends.end, facts)
        elif failures:
            self.say(unseen(f"what it does: the audit failed in {failures[0]} {REPORT}"))
        elif never := facts.events("no_gradient"):
            self.answer("ends", ends.end, facts)
            text = "no backward pass reaches the weights that the optimizer has"
            self.say(error("RC305", never[0], text))
        elif facts.failures and any(event["passes"] for event in run.events):
            self.answer("ends", ends.end, facts)
        elif any(event["passes"] for event in run.events):
            self.answer("ends", ends.end, facts)
            text = "it calls no step() of a torch optimizer"
            if facts.events("closure"):
                text = "a single step() computes all gradients, in its closure"
            self.say(unseen(f"how it trains: {text}"))
        elif run.hangs.count("in line") > 1:
            self.answer("ends", ends.end, facts)
        elif not any(finding.level == "error" for finding in self.findings):
            raise CannotRunError(run.hangs or ends.why_not(facts))
