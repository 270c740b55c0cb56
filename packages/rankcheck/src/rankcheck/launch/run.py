"""A training that is judged: what it prints, what the witness writes of it, and where it hangs."""

import contextlib
import linecache
import os
import re
import shlex
import signal
import time
from json import loads
from pathlib import Path

from rankcheck.launch.jobs import TimeLimit

SILENCE_S = 30  # after which a run hangs; a right script is silent for less than 15
STACK = re.compile(
    r"(\[rank\d+\]:)?(  (?!what)|\s*Traceback|[WE]\d{4} |.*resource_tracker"
    r"|Thread 0x|Extension modules|$)"
)


SETS = "the order of a set is another one in each process: sort it"


def differences(one, other):
    """Yields what differs between two processes: its kind, a sentence, and where.

    The kind is order, optimizer order or shape.
    """
    orders = [[event for event in events if "order" in event] for events in (one, other)]
    for mine, others in zip(*orders, strict=False):
        pairs = list(zip(mine["tensors"], others["tensors"], strict=False))
        number = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        names = [[name for name, _ in event["tensors"]] for event in (mine, others)]
        if (
            number is None
            or mine["order"] != others["order"]
            or sorted(names[0]) != sorted(names[1])
        ):
            continue  # or these are parts of a model
        (a, shape), (b, other_shape) = pairs[number]
        if a != b:
            parts = a.split(".")
            prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
            child = next(prefix for prefix in prefixes if not f"{b}.".startswith(f"{prefix}."))
            place = mine["places"].get(child, mine["place"])
            text = f"{mine['order']} {number + 1} is {a} in one process, and {b} in another: {SETS}"
            yield "optimizer order" if "optimizer" in mine["order"] else "order", text, place
        elif mine["ddp"]:
            text = f"{a} has the shape {shape} in one process, and {other_shape} in another"
            yield "shape", text, mine["places"].get(a, mine["place"])


def targets_by_hash(processes):
    """Yields where targets depend on the hashes of strings, as the order of a set does.

    They are equal in processes whose hashes are, of several ranks or runs, and differ in others.
    """
    seen = [[event for event in events if event.get("targets")] for events in processes]
    for events in zip(*filter(None, seen), strict=False):
        by_hash = {}
        for event in events:
            by_hash.setdefault(event["hash"], []).append(event["targets"])
        alike = all(len(found) > 1 == len({*found}) for found in by_hash.values())
        distinct = {found[0] for found in by_hash.values()}
        if alike and len(distinct) == len(by_hash) > 1 == len({e["inputs"] for e in events}):
            text = f"the same samples have other targets in another process: {SETS}"
            yield "targets", text, events[0]["place"]


def rank_of(events):
    return max(event["rank"] for event in events)  # 0 before it joins a group


def start_observed(shell, folders, script, observer, arguments, launcher, **variables):
    """Starts the ranks of a script, or what starts them, with the witness: see witness/start.py."""
    variables |= {"WITNESS_SCRIPT": str(script), "WITNESS_OBSERVER": str(observer)}
    if launcher != "python":
        variables["WITNESS_TORCHRUN"] = "1"
    start = Path(__file__).parents[1] / "witness" / "start.py"
    return shell.ranks_on(folders, f"{shlex.quote(str(start))} {arguments}", **variables)


class Run:
    """What a training has printed, and what the witness has written of each of its processes."""

    def __init__(self, jobs, folder, file, seconds=0, silence_s=SILENCE_S, tick=None):
        """Waits for the jobs, for at least so many seconds if something happens.

        Meanwhile `tick` is called, often. The seconds begin anew when a file `begun` is there.
        """
        self.tick = tick or (lambda: None)
        self.silence_s = silence_s
        self.file = file
        self.seconds = max(seconds, 10 * SILENCE_S)
        self.is_long = False  # and has therefore been ended
        self.folder = folder
        self.hangs = ""  # where
        self.is_deadlock = False  # of ranks that all wait within torch, and so for each other
        self.statuses = self.wait(jobs)
        self.output = "".join(job.output for job in jobs)
        for job in jobs:
            job.end()
        # A kill may interrupt a line.
        files = [path.read_text().split("\n")[:-1] for path in folder.glob("*.jsonl")]
        self.processes = [list(map(loads, lines)) for lines in files]
        self.events = [event for events in self.processes for event in events]
        trained = [events for events in self.processes if any("samples" in e for e in events)]
        self.ranks = sorted(trained, key=rank_of)  # the events of each process that has trained
        self.steps = [[event for event in events if "samples" in event] for events in self.ranks]
        failures = [path.read_text().splitlines() for path in folder.glob("*.failed")]
        self.failures = sorted({tuple(loads(line)) for lines in failures for line in lines})
        self.initial = next(folder.glob("*.initial"), None)

    def wait(self, jobs):
        """Returns the jobs' exit statuses; of a run that hangs, none, and `hangs` says where."""
        silence, whole = TimeLimit(self.silence_s), TimeLimit(self.seconds)
        used, begun = 0.0, self.folder / "begun"
        while None in (statuses := [job.status() for job in jobs]):
            written = [*self.folder.glob("*.jsonl"), *(job.log for job in jobs)]
            self.tick()
            if whole.passed([begun] if begun.exists() else []):
                self.is_long = True
                self.hangs = f"It has not ended after {whole.limit:.0f} seconds: train with less."
                return []
            if silence.passed(written):
                before, used = used, self.cpu_seconds()
                if used - before > self.silence_s / 10:  # it computes: who hangs only waits
                    silence.start = time.monotonic()
                    continue
                seconds, import_s = silence.seconds_passed(), silence.import_s
                self.hangs = f"It hangs: for {seconds:.0f} seconds, nothing has happened."
                if silence.limit > self.silence_s:
                    self.hangs += f" (This machine is busy: torch took {import_s:.0f} s to load.)"
                self.hangs += self.places()
                return []
            time.sleep(0.05)
        return statuses

    def cpu_seconds(self):
        """Returns how long the processes have computed, as Linux counts it; elsewhere 0."""
        ticks = 0
        for path in self.folder.glob("*.stack"):
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{path.stem}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def places(self):
        """Says at which line of the script each rank waits."""
        alive = []
        for path in self.folder.glob("*.stack"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.stem), signal.SIGUSR1)  # see the witness
                alive.append(path)
        deadline = time.monotonic() + SILENCE_S
        while any(path.read_text().count("\n") < 2 for path in alive):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        waiting, in_torch = [], []
        for path in alive:
            rank, *frames = path.read_text().splitlines()
            events = path.with_suffix(".jsonl")
            if events.exists():
                rank = loads(events.read_text().splitlines()[-1])["rank"]
            innermost = next((frame for frame in frames if 'File "' in frame), "")
            in_torch.append("/torch/" in innermost and "/torch/utils/data/" not in innermost)
            frame = next((frame for frame in frames if f'"{self.file}"' in frame), "")
            if rank != "" and frame:
                number = int(re.search(r"line (\d+)", frame)[1])
                code = linecache.getline(str(self.file), number).strip()
                waiting.append(f"\nRank {rank} waits in line {number}: {code}")
        self.is_deadlock = len(in_torch) > 1 and all(in_torch)
        watch = f"\nWatch each rank: rankcheck watch {os.path.relpath(self.file)}\n"
        return "".join(sorted(waiting)) + watch

    def lines(self):
        """Returns the lines of the output, of a traceback only where the script itself failed."""
        lines = []
        frame = []  # the last one of the script
        for line in self.output.splitlines():
            if f'File "{self.file}", line' in line:
                frame = [line]
            elif len(frame) == 1:
                frame.append(line)  # its code
            elif not STACK.match(line):
                lines += [*frame, line]
                frame = []
        return lines + frame

    def differences(self, *runs):
        """Yields in what the processes of this run, and of others, differ: see `differences`."""
        others = [run for run in runs if run is not self]
        processes = [events for run in (self, *others) for events in run.processes]
        ordered = [events for events in processes if any("order" in e for e in events)]
        for events in ordered[1:]:
            yield from differences(ordered[0], events)
        yield from targets_by_hash(processes)

    @property
    def succeeded(self):
        return bool(self.statuses) and not any(self.statuses)

    def stay_in_group(self):
        """Whether processes end without destroy_process_group."""
        return len(self.values("left")) < len(self.values("joined"))

    def values(self, key):
        return sorted(event[key] for event in self.events if key in event)
