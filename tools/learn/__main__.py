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
import termios
import textwrap
import tty
from pathlib import Path

from rankcheck.launch.scripts import end_at_signals

from tools.learn.exercises import read_exercises
from tools.steps import ROOT

KEYS = "h: hint   n: next   b: back   q: quit"
DURING_A_CHECK = " (keys work after it, Ctrl-C at once)"
WRONG = ", after a wrong prediction"


def say(text):
    """Prints a text, wrapped, in place of the check that the judge shows as running."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    start = "\r\033[K" if sys.stdout.isatty() else ""
    print(start + textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  "))


class Keys:
    """What the keys of an exercise do: h shows the next hint, the others leave it."""

    def __init__(self, hints):
        self.hints = iter(hints)
        self.left = ""  # the key that has left the exercise

    def typed(self, text):
        """Does what a key asks for; returns whether it is one."""
        if text == "h":
            say(next(self.hints, "There are no more hints."))
        elif text in ("n", "b", "q"):
            self.left = text
        return text in ("h", "n", "b", "q")

    def leave(self):
        """Reads a key if one is typed; returns whether it leaves. The end of the input is a q."""
        if select.select([sys.stdin], [], [], 0)[0]:
            self.typed(os.read(sys.stdin.fileno(), 1).decode(errors="ignore") or "q")
        return bool(self.left)


def edit(exercise, folder, keys):
    """Judges the file at each save; returns whether it passes before a key leaves it."""
    from tools.judge.checks import toy_task  # these import torch
    from tools.judge.watch import saved, watch

    file = exercise.path(folder)
    edited = file.exists() and file.read_text() != exercise.source()
    exercise.write(folder)
    judged = 0 if edited else saved(file)  # what was saved before is judged at once
    terminal = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)  # keys come without Enter
    say(f"Edit {file}: each save is judged.")
    say(KEYS)
    try:
        judging = exercise.stage, file, toy_task, exercise.check, judged
        return watch(*judging, leave=keys.leave, note=DURING_A_CHECK)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, terminal)


def predict(exercise, keys):
    """Asks for a prediction, and runs its command; returns whether it is right."""
    choices = exercise.choices.split(", ")
    say(f"Type {' or '.join(choices)}, or a key of the following, and Enter.")
    say(KEYS)
    termios.tcflush(sys.stdin, termios.TCIFLUSH)  # what was typed before the question
    typed = ""
    while typed not in choices and not (choices == ["a number"] and typed.isdigit()):
        if typed and not keys.typed(typed):
            say(f"{typed!r} is no answer: type {' or '.join(choices)}.")
        if keys.left:
            return False
        try:
            typed = input("  > ").strip().lower()
        except EOFError:
            typed = "q"
    print(f"\n$ {exercise.command}", flush=True)
    output, found = exercise.answer()
    print(textwrap.indent("\n".join(output.splitlines()[-12:]), "| "))
    mark = "✓" if typed == found else "✗"
    say(f"{mark} You said {typed}, and it is {found}. {exercise.why}")
    return typed == found


class Progress:
    """Which exercises are passed, each with the version at which, and where the learner is."""

    def __init__(self, folder):
        self.folder = folder
        self.exercises = read_exercises()
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "progress.json"
        try:
            state = json.loads(self.file.read_text()) if self.file.exists() else {}
        except json.JSONDecodeError:
            sys.exit(f"{self.file} is damaged: delete it to begin afresh")
        self.passed = state.get("passed", {})
        self.number = state.get("number", 0)  # its name might give a fault away

    def write(self):
        state = {"passed": self.passed, "number": self.number}
        self.file.write_text(json.dumps(state, indent=1) + "\n")

    def mark(self, number):
        passed = self.passed.get(self.exercises[number].key)
        if passed:
            return "✗" if passed.endswith(WRONG) else "✓"
        return ">" if number == self.number else "."

    def marks(self, stage):
        """Returns a line with a mark for each exercise of a script."""
        numbers = [n for n, exercise in enumerate(self.exercises) if exercise.stage == stage]
        return f"  {stage:30}" + " ".join(map(self.mark, numbers))

    def overview(self):
        count = sum(exercise.key in self.passed for exercise in self.exercises)
        return f"{count} of {len(self.exercises)} exercises passed"

    def still_open(self, start):
        """Returns the numbers of those to be passed, those from `start` on before the others."""
        numbers = [*range(start, len(self.exercises)), *range(start)]
        return [n for n in numbers if self.exercises[n].key not in self.passed]

    def report(self):
        """Writes a file that says what is passed; the names of others would give them away."""
        lines = [f"{name}: passed at version {at}" for name, at in self.passed.items()]
        file = self.folder / "report.txt"
        file.write_text("\n".join([self.overview(), *lines]) + "\n")
        print(f"{file} says what is passed, and at which version.")

    def learn(self):
        """Goes through the exercises until all are passed, or the learner quits."""
        command = ["git", "describe", "--always", "--dirty", "--tags"]
        version = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        numbers = self.still_open(self.number)
        while numbers:
            self.number = numbers[0]
            self.write()
            exercise = self.exercises[self.number]
            print(f"\n{exercise.kind.capitalize()}\n{self.marks(exercise.stage)}\n")
            say(exercise.task)
            keys = Keys(exercise.hints(self.folder))
            predicts = exercise.kind == "predict"
            right = predict(exercise, keys) if predicts else edit(exercise, self.folder, keys)
            if keys.left == "q":
                return
            if not keys.left:
                self.passed[exercise.key] = (version or "unknown") + ("" if right else WRONG)
                self.write()
            numbers = self.still_open(self.number + 1)
            if keys.left == "b":
                numbers = [max(0, self.number - 1)]
        print(f"\n{self.overview()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", nargs="?", help="begin with its exercises, such as multinode")
    parser.add_argument("--report", action="store_true", help="write what is passed into a file")
    parser.add_argument("--folder", type=Path, default=Path("exercises"), help="of your files")
    args = parser.parse_args()
    progress = Progress(args.folder)
    stages = [exercise.stage for exercise in progress.exercises]
    if args.script:
        if args.script not in stages:
            parser.error(f"no exercises are of it, but of {', '.join(dict.fromkeys(stages))}")
        progress.number = stages.index(args.script)
    if args.report:
        progress.report()
        return
    print(f"{progress.overview()}\n", *map(progress.marks, dict.fromkeys(stages)), sep="\n")
    if not sys.stdin.isatty():
        numbers = progress.still_open(progress.number)
        exercises = [progress.exercises[n] for n in numbers]
        for exercise in [e for e in exercises if e.kind != "predict"][:1]:
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
        progress.learn()
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
