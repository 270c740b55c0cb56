"""A terminal as a user has it, and whether it shows what a page shows."""

import contextlib
import os
import re
import socket
import time

import pexpect
import pytest
from rankcheck.launch.jobs import TIMEOUT_S, TimeLimit

# Between a command that ends and the next prompt, the shell prints the command's exit status.
PROMPT = re.compile(r"<status (\d+)>")
NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")


def eventually(condition, terminals):
    """Waits until `condition` holds for the output of one of the terminals."""
    limit = TimeLimit(4 * TIMEOUT_S)  # make run takes three minutes, idle
    while not limit.passed():
        for terminal in terminals:
            if condition(terminal.read()):
                return
    output = "\n".join(terminal.output for terminal in terminals)
    raise AssertionError(f"nothing in {limit.limit:.0f} s:\n{output}")


class Terminal:
    """A shell in a terminal, as a user has it."""

    def __init__(self, folder):
        self.output = ""
        self.start_of_last = 0  # of the last command, in `output`
        variables = {key: os.environ[key] for key in ("PATH", "HOME", "USER") if key in os.environ}
        variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"  # seconds, in place of 30
        variables["CUDA_VISIBLE_DEVICES"] = ""  # what the pages show is of CPUs
        self.bash = pexpect.spawn(
            "env",  # what starts tests in the background makes them ignore these signals
            ["--default-signal=INT,HUP", "bash", "--norc"],
            cwd=folder,
            env=variables | {"PROMPT_COMMAND": 'echo "<status $?>"', "TERM": "dumb"},
            encoding="utf-8",
            dimensions=(50, 250),
        )
        self.status()

    def read(self):
        """Returns the output of the last command so far."""
        end = time.monotonic() + 1  # of a script that prints without a pause, no more for now
        with contextlib.suppress(pexpect.TIMEOUT):
            while time.monotonic() < end:
                self.output += self.bash.read_nonblocking(100_000, timeout=0.05)
        return self.output[self.start_of_last :]

    def enter(self, command):
        self.read()
        self.start_of_last = len(self.output)
        self.bash.sendline(command)

    def sees(self, pattern):
        eventually(lambda output: re.search(pattern, output), [self])

    def is_busy(self):
        return not PROMPT.search(self.read())

    def status(self):
        """Waits until the last command has ended; returns its exit status."""
        self.sees(PROMPT)
        return int(PROMPT.search(self.read())[1])

    def run(self, command, status=0):
        self.enter(command)
        assert self.status() == status, self.read()

    def interrupt(self):
        if self.is_busy():
            self.bash.sendintr()
        return self.status()


def agrees(output, text):
    """Tells whether `output` has the lines of `text`; numbers within 5 %.

    The lines between two lines of "…" may have another order there, as those of several ranks do.
    """
    # A line replaces a progress bar, or another line, from a carriage return on.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in output.split("\n")]
    text = text.replace("laptop", socket.gethostname())
    start = 0
    for block in re.split(r"^…\n", text, flags=re.MULTILINE):
        found = [find(lines, start, expected) for expected in block.splitlines()]
        if None in found:
            return False
        start = max(found, default=start - 1) + 1
    return True


def find(lines, start, expected):
    """Returns the index of the first line from `start` on that agrees with the expected one."""
    parts = map(re.escape, NUMBER.sub("0.0", expected).split("…"))
    pattern = ".*".join(parts).replace(re.escape("0.0"), f"({NUMBER.pattern})")
    numbers = [float(number) for number in NUMBER.findall(expected)]
    for index in range(start, len(lines)):
        match = re.search(pattern, lines[index])
        if match and list(map(float, match.groups())) == pytest.approx(numbers, rel=0.05):
            return index
    return None
