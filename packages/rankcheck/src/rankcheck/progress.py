"""Says which run is on, and for how long, on standard error: one line, renewed on a terminal."""

import sys
import time


class Progress:
    def __init__(self, total, stream=None):
        self.total = total
        self.stream = stream or sys.stderr
        self.number = 0
        self.shown = ""
        self.start_of_run = time.monotonic()
        self.what = ""

    def begin(self, what):
        self.number += 1
        self.total = max(self.total, self.number)
        self.what = what
        self.start_of_run = time.monotonic()
        if not self.stream.isatty():
            print(f"run {self.number} of {self.total}: {what}", file=self.stream, flush=True)
        self.tick()

    def tick(self):
        """Is called while a run is waited for."""
        seconds = time.monotonic() - self.start_of_run
        line = f"run {self.number} of {self.total}: {self.what} ({seconds:.0f} s)"
        if self.stream.isatty() and line != self.shown:
            print(f"\r\033[K{line}", end="", file=self.stream, flush=True)
            self.shown = line

    def end(self):
        if self.shown:
            print("\r\033[K", end="", file=self.stream, flush=True)
            self.shown = ""
