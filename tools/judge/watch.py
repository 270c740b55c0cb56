"""Judges a script at each save: make check WATCH=1 and make learn."""

import tempfile
import time
from pathlib import Path

from tools.judge.checks import judge


def saved(file):
    """Returns when a file was saved; 0 while an editor replaces it."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def watch(stage, file, task, first="", judged=0, leave=lambda: False, note=" (Ctrl-C ends it)"):
    """Judges a file at each save until it passes; returns False if `leave` says so before.

    What was saved at the time `judged` needs no verdict.
    """

    def interrupted():
        return leave() or saved(file) not in (0, judged)

    while not leave():
        if saved(file) in (0, judged):
            time.sleep(0.1)
            continue
        judged = saved(file)
        with tempfile.TemporaryDirectory() as folder:
            try:
                failed = judge(stage, file, task, Path(folder), first, interrupted, note)
            except Exception as error:  # no run that the judge can read
                failed = [first]
                print(f"\nThe judge cannot follow this script: {error!r}")
        if failed == []:
            return True
        if failed and not leave():
            print(f"{file} is judged again when it is saved.", flush=True)
    return False
