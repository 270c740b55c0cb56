"""Exercises in the terminal, each judged whenever its file is saved: make learn

It shows how far you are and names the next exercise: a file to edit in an editor of yours, or a run
whose result you predict. Progress is kept beside the files, in exercises/.
"""

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import tty
from pathlib import Path

from rankcheck.launch.scripts import end_at_signals

from tools.learn.exercises import Exercise, FileExercise, Predict, read_exercises
from tools.steps import ROOT

KEYS = "h: hint   s: what it is about   n: next   b: back   q: quit (during a check: Ctrl-C)"


def say(text):
    """Prints a text, wrapped, in place of the check that the judge shows as running."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    start = "\r\033[K" if sys.stdout.isatty() else ""
    print(start + textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  "))


def key(seconds):
    """Returns the key that is typed within so many seconds, or ""; at the end of the input, q."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 1).decode(errors="ignore") or "q"


def version():
    """Returns the version of this repository."""
    command = ["git", "describe", "--always", "--dirty", "--tags"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


class Progress:
    """Which exercises are passed, each with the version at which, and where the learner is."""

    def __init__(self, exercises, folder):
        self.exercises = exercises
        self.file = folder / "progress.json"
        try:
            read = json.loads(self.file.read_text()) if self.file.exists() else {}
        except json.JSONDecodeError:
            sys.exit(f"{self.file} is damaged: delete it to begin afresh")
        self.passed = read.get("passed", {})
        self.at = read.get("at", "")

    def write(self):
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"passed": self.passed, "at": self.at}, indent=1) + "\n")

    def mark(self, exercise):
        if exercise.key in self.passed:
            return "✓"
        return ">" if exercise.place == self.at else "."

    def marks(self, stage):
        """Returns a line with a mark for each exercise of a script."""
        return f"  {stage:30}" + " ".join(self.mark(e) for e in self.exercises if e.stage == stage)

    def overview(self):
        count = sum(exercise.key in self.passed for exercise in self.exercises)
        return f"{count} of {len(self.exercises)} exercises passed"

    def following(self, kind=Exercise, skip=False):
        """Returns the first exercise of a kind that is open, from where the learner is, or None."""
        places = [exercise.place for exercise in self.exercises]
        start = places.index(self.at) + skip if self.at in places else 0
        from_here = self.exercises[start:] + self.exercises[:start]
        still_open = (e for e in from_here if isinstance(e, kind) and e.key not in self.passed)
        return next(still_open, None)

    def previous(self):
        """Returns the exercise before the one where the learner is, passed or not."""
        places = [exercise.place for exercise in self.exercises]
        return self.exercises[max(0, places.index(self.at) - 1)]

    def report(self):
        """Writes a file that says what is passed; the names of others would give them away."""
        lines = [f"{name}: passed at version {at}" for name, at in self.passed.items()]
        file = self.file.with_name("report.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join([self.overview(), *lines]) + "\n")
        print(f"{file} says what is passed, and at which version.")


class Attempt:
    """An exercise with a file, which is judged at each save until it passes or is left."""

    def __init__(self, exercise, folder):
        self.exercise = exercise
        self.file = exercise.path(folder)
        edited = self.file.exists() and self.file.read_text() != exercise.source()
        exercise.write(folder)
        self.hints = iter(exercise.hints(folder))
        self.judged = 0 if edited else self.saved()  # what was saved before is judged at once
        self.left = ""  # the key that leaves it

    def saved(self):
        """Returns when the file was saved; 0 while an editor replaces it."""
        try:
            return self.file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def interrupted(self, seconds=0.0):
        """Handles a key; returns whether it leaves the exercise, or the file is a new one."""
        typed = key(seconds)
        if typed == "h":
            say(next(self.hints, "There are no more hints."))
        elif typed == "s":
            say(f"It is about {self.exercise.about}.")
        elif typed and typed in "nbq":
            self.left = typed
        return bool(self.left) or self.saved() not in (0, self.judged)

    def passes(self):
        """Judges the file as it is now."""
        from tools.judge.checks import judge, toy_task  # which imports torch

        self.judged = self.saved()
        print()
        stage, check = self.exercise.stage, self.exercise.check
        with tempfile.TemporaryDirectory() as folder:
            try:
                failed = judge(stage, self.file, toy_task, Path(folder), check, self.interrupted)
            except Exception as error:  # no run that the judge can read
                say(f"The judge cannot follow this script: {error!r}")
                return False
        return failed == []

    def run(self):
        """Returns "passed", or the key that leaves it."""
        say(f"Edit {self.file}: each save is judged.")
        say(KEYS)
        terminal = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)  # keys come without Enter
        try:
            while not self.left:
                if self.interrupted(0.2) and not self.left and self.passes():
                    return "passed"
            return self.left
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, terminal)


def ask(exercise):
    """Asks for a prediction, and runs what it is about.

    Returns "passed", "seen" if the prediction was wrong, or the key to leave.
    """
    choices = exercise.choices.split(", ")
    say(f"Type {' or '.join(choices)}, or a key of the following, and Enter.")
    say(KEYS)
    termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before the question
    typed = ""
    while typed not in choices and not (choices == ["a number"] and typed.isdigit()):
        if typed in ("n", "b", "q"):
            return typed
        if typed in ("h", "s"):
            say(f"It is about {exercise.about}.")
        elif typed:
            say(f"{typed!r} is no answer: type {' or '.join(choices)}.")
        try:
            typed = input("  > ").strip().lower()
        except EOFError:
            typed = "q"
    say("Running …")
    found = exercise.answer()
    print()
    say(f"You said {typed}, and it is {found}. {exercise.why}")
    return "passed" if typed == str(found) else "seen"


def learn(progress, folder):
    """Goes through the exercises until all are passed, or the learner quits."""
    exercise = progress.following()
    while exercise:
        progress.at = exercise.place
        progress.write()
        print(f"\n{exercise.kind.capitalize()}\n{progress.marks(exercise.stage)}\n")
        say(exercise.task)
        result = ask(exercise) if isinstance(exercise, Predict) else Attempt(exercise, folder).run()
        if result == "q":
            return
        if result in ("passed", "seen"):
            note = "" if result == "passed" else ", after a wrong prediction"
            progress.passed[exercise.key] = f"{version()}{note}"
        exercise = progress.previous() if result == "b" else progress.following(skip=True)
        progress.write()
    print(f"\n{progress.overview()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", nargs="?", help="begin with its exercises, such as multinode")
    parser.add_argument("--report", action="store_true", help="write what is passed into a file")
    parser.add_argument("--folder", type=Path, default=Path("exercises"), help="of your files")
    args = parser.parse_args()
    progress = Progress(read_exercises(), args.folder)
    stages = dict.fromkeys(exercise.stage for exercise in progress.exercises)
    if args.script:
        if args.script not in stages:
            parser.error(f"no exercises are of {args.script}, but of {', '.join(stages)}")
        progress.at = next(e.place for e in progress.exercises if e.stage == args.script)
    if args.report:
        progress.report()
        return
    print(f"{progress.overview()}\n")
    for stage in stages:
        print(progress.marks(stage))
    if not sys.stdin.isatty():
        if exercise := progress.following(FileExercise):
            print()
            say(f"Next: {exercise.task}")
            print("\nThis is no terminal. Edit the file, and have it judged by")
            print(f"  make check STAGE={exercise.stage} FILE={exercise.write(args.folder)}")
        return
    print("\nLoading PyTorch …", flush=True)
    from rankcheck.launch.jobs import SERVERS

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as the judge runs scripts
    for server in SERVERS:  # which load torch while the learner reads
        server.ensure_running()
    end_at_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        learn(progress, args.folder)
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
