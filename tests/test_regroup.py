"""Survivors regroup: the weights are those of an undisturbed run, whoever dies or joins."""

import json
import random
import socket
import time

import pytest
import torch
from helpers import (
    TIMEOUT_S,
    free_port,
    max_abs_diff,
    patched,
    reference_run,
    weights_and_momentum,
)

EPOCHS = 40

# Each process writes down each step that it has completed: when, where, and in which group.
RECORD = """
import json
torch.set_default_dtype(torch.float64)
record = open(f"{os.getpid()}.steps", "w", buffering=1)
run_batch = script.Trainer._run_batch
def run_and_record(self, inputs, targets):
    time.sleep(float(os.environ.get("STEP_S", 0)))
    run_batch(self, inputs, targets)
    position = (self.epochs_run, self.samples_run)
    event = time.time(), position, self.group.number, script.dist.get_world_size()
    record.write(json.dumps(event) + "\\n")
script.Trainer._run_batch = run_and_record
"""


class Training:
    """A coordinator, and processes that come and go; see `RECORD`."""

    def __init__(self, shell, epochs, patience=5, **variables):
        self.shell = shell
        self.variables = variables
        self.port = free_port()
        while not self.is_free(self.port + 1):
            self.port = free_port()
        (shell.folder / "regroup.py").write_text(patched("recipes/regroup.py", RECORD))
        self.command = (
            f"{shell.folder}/regroup.py {epochs} 1 --save_every_steps 100000 --timeout 0.1"
            f" --coordinator localhost:{self.port}"
        )
        self.coordinator = shell.start(
            f"exec python recipes/coordinator.py localhost:{self.port} {patience}"
        )
        deadline = time.monotonic() + TIMEOUT_S
        while self.is_free(self.port + 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.processes = []

    @staticmethod
    def is_free(port):
        with socket.socket() as client:
            return client.connect_ex(("localhost", port)) != 0

    def join(self):
        self.processes.append(self.shell.ranks(self.command, **self.variables))

    def kill(self, process):
        self.processes.remove(process)
        process.ranks[0].kill()
        process.ranks[0].join(TIMEOUT_S)
        return time.time()

    def steps(self):
        """Returns the steps that each process has completed."""
        paths = self.shell.folder.glob("*.steps")
        return [[json.loads(line) for line in path.open() if line[-1] == "\n"] for path in paths]

    def wait_for_group(self, size):
        """Waits until a step is completed in a group of so many processes."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            last = max((steps[-1] for steps in self.steps() if steps), default=[0, 0, 0, 0])
            if last[3] == size:
                return
            assert time.monotonic() < deadline, self.processes[0].output
            time.sleep(0.02)

    def ends(self, epochs):
        """Asserts that all succeed, with the weights of an undisturbed run, one group at a time."""
        for process in self.processes:
            process.succeeds()
        assert self.coordinator.succeeds() == ""
        steps = sorted(step for steps in self.steps() for step in steps)
        found, _ = weights_and_momentum(self.shell.folder / "snapshot.pt")
        torch.set_default_dtype(torch.float64)
        try:
            expected, _, _ = reference_run(epochs, 64)
        finally:
            torch.set_default_dtype(torch.float32)
        assert max_abs_diff(found, expected) < 1e-9
        groups = [group for _, _, group, _ in steps]
        assert groups == sorted(groups)  # nobody trains on in an older group
        assert len({tuple(position) for _, position, _, _ in steps}) == epochs * 32
        return steps


def recovery_s(steps, kill):
    """Returns the time from a kill to the next step that is completed in a new group."""
    group = max((group for when, _, group, _ in steps if when < kill), default=0)
    return min(when for when, _, number, _ in steps if number > group) - kill


def test_killed_and_joined(shell):
    training = Training(shell, 40, STEP_S="0.005")
    for size in (1, 2, 3):
        training.join()
        training.wait_for_group(size)
    kills = []
    for size, process in [(2, 0), (1, 1)]:  # the first was rank 0 at some time
        kills.append(training.kill(training.processes[process]))
        training.wait_for_group(size)
    training.join()
    training.wait_for_group(2)
    steps = training.ends(40)
    print("recovered after", [recovery_s(steps, kill) for kill in kills])


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10))
def test_twenty_kills_and_ten_joins(shell, seed):
    """In random order and at random moments, among 2 to 6 processes; some kills come in pairs."""
    rng = random.Random(seed)
    training = Training(shell, 3000, STEP_S="0.002")
    for _ in range(rng.randint(2, 6)):
        training.join()
    size = len(training.processes)
    training.wait_for_group(size)
    kills, joins = 20, 10
    while kills or joins:
        time.sleep(rng.expovariate(5))  # not a wait for anything: a random moment
        if len(training.processes) > 2 and kills:
            training.kill(rng.choice(training.processes))
            kills -= 1
            if rng.random() < 0.7:
                training.wait_for_group(len(training.processes))
        elif len(training.processes) < 6:
            training.join()
            joins -= 1
            training.wait_for_group(len(training.processes))
