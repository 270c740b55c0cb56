"""A training that is judged: what it prints, what the witness writes of it, and where it hangs."""

import contextlib
import linecache
import os
import re
import signal
import textwrap
import time
from json import loads

from tools.launch.jobs import TimeLimit

SILENCE_S = 30  # after which a run hangs; a right script is silent for less than 15
STACK = re.compile(
    r"(\[rank\d+\]:)?(  (?!what)|\s*Traceback|[WE]\d{4} |.*resource_tracker"
    r"|Thread 0x|Extension modules|$)"
)


class WrongError(Exception):
    """What a check has seen that is wrong."""


class Run:
    """What a training has printed, and what the witness has written of each of its processes."""

    def __init__(self, jobs, folder, file, seconds=0):
        """Waits for the jobs, for at least so many seconds if something happens."""
        self.file = file
        self.seconds = max(seconds, 10 * SILENCE_S)
        self.is_long = False  # and has therefore been ended
        self.folder = folder
        self.hangs = ""  # where
        self.statuses = self.wait(jobs)
        self.output = "".join(job.output for job in jobs)
        for job in jobs:
            job.end()
        files = [path.read_text().splitlines() for path in folder.glob("*.jsonl")]
        processes = [list(map(loads, lines)) for lines in files]
        self.processes = processes
        self.events = [event for events in processes for event in events]
        steps = [[event for event in events if "samples" in event] for events in processes]
        self.steps = sorted(filter(None, steps), key=lambda steps: steps[0]["rank"])
        self.initial = next(folder.glob("*.initial"), None)

    def wait(self, jobs):
        """Returns the jobs' exit statuses; of a run that hangs, none, and `hangs` says where."""
        silence, whole = TimeLimit(SILENCE_S), TimeLimit(self.seconds)
        while None in (statuses := [job.status() for job in jobs]):
            written = [*self.folder.glob("*.jsonl"), *(job.log for job in jobs)]
            if whole.passed():
                self.is_long = True
                self.hangs = f"It has not ended after {whole.limit:.0f} seconds: train with less."
                return []
            if silence.passed(written):
                seconds, import_s = silence.seconds_passed(), silence.import_s
                self.hangs = f"It hangs: for {seconds:.0f} seconds, nothing has happened."
                if silence.limit > SILENCE_S:
                    self.hangs += f" (This machine is busy: torch took {import_s:.0f} s to load.)"
                self.hangs += self.places()
                return []
            time.sleep(0.05)
        return statuses

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
        waiting = []
        for path in alive:
            rank, *frames = path.read_text().splitlines()
            events = path.with_suffix(".jsonl")
            if events.exists():
                rank = loads(events.read_text().splitlines()[-1])["rank"]
            frame = next((frame for frame in frames if f'"{self.file}"' in frame), "")
            if rank != "" and frame:
                number = int(re.search(r"line (\d+)", frame)[1])
                code = linecache.getline(str(self.file), number).strip()
                waiting.append(f"\nRank {rank} waits in line {number}: {code}")
        watch = f"\nWatch each rank: python -m tools.watch {os.path.relpath(self.file)}\n"
        return "".join(sorted(waiting)) + watch

    def require(self, ok, message):
        """Raises WrongError with the last lines of the run, unless it is `ok` and has ended."""
        if not (ok and self.statuses):
            message = self.hangs or f"{message} "
            if "collective mismatch" in self.output:
                message += "The ranks have called different collectives. "
            lines = self.lines() or ["nothing"]
            shown = "\n".join(lines[:9] + ["…"] * (len(lines) > 12) + lines[9:][-3:])
            raise WrongError(f"{message}It has printed:\n{textwrap.indent(shown, '| ')}")

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

    @property
    def succeeded(self):
        return bool(self.statuses) and not any(self.statuses)

    def succeed(self):
        self.require(self.succeeded, "The run failed.")

    def losses(self):
        """Returns the logged loss of each epoch."""
        # resumable.py and what builds on it log `epoch 1 + 640 samples` within an epoch.
        lines = r"^epoch (\d+)(?: \+ 0 samples)? \|.*\bloss ([-+.\w]+)"
        return {int(epoch): float(loss) for epoch, loss in re.findall(lines, self.output, re.M)}

    def batches(self):
        """Returns the samples of each step, of all ranks together."""
        return [
            [sample for step in ranks for sample in step["samples"]]
            for ranks in zip(*self.steps, strict=False)
        ]

    def values(self, key):
        return sorted(event[key] for event in self.events if key in event)
