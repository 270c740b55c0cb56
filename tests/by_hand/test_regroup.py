"""Survivors regroup: the weights are those of an undisturbed run, whoever dies or joins."""

import json
import os
import random
import signal
import socket
import time

import pytest
import torch
from helpers import assert_trained, patch, position, read_script
from rankcheck.launch.jobs import TIMEOUT_S, TimeLimit, free_port, pretend_gpus

from tools.steps import ROOT

RECORD = read_script("record_steps.py")


def complete_lines(path):
    return path.read_text().split("\n")[:-1]  # the last one may still be written


class Training:
    """A coordinator, and processes that come and go; see `RECORD`."""

    def __init__(self, shell, epochs, options="", patience=30, setup=""):
        self.shell = shell
        self.epochs = epochs
        self.port = free_port(2)
        script = patch(shell.folder, "by_hand/regroup.py", RECORD + setup)
        self.command = (
            f"{script} {epochs} 1000 --timeout 3 {options} --coordinator localhost:{self.port}"
        )
        self.coordinator = shell.start(
            f"exec python by_hand/coordinator.py localhost:{self.port} {patience}"
        )
        limit = TimeLimit()
        while not self.coordinator_listens():
            assert not limit.passed(), self.coordinator.output
            time.sleep(0.05)
        self.processes = []

    def coordinator_listens(self):
        with socket.socket() as client:
            return client.connect_ex(("localhost", self.port + 1)) == 0

    def join(self):
        self.processes.append(self.shell.ranks(self.command))

    def kill(self, process):
        self.processes.remove(process)
        process.ranks[0].kill()
        process.ranks[0].join(TIMEOUT_S)
        return time.time()

    def steps(self):
        """Returns the steps that each process has completed."""
        paths = self.shell.folder.glob("*.steps")
        return [[json.loads(line) for line in complete_lines(path)] for path in paths]

    def last_step(self):
        """Returns the step that has begun last, of those that are completed."""
        texts = map(complete_lines, self.shell.folder.glob("*.steps"))
        return max((json.loads(lines[-1]) for lines in texts if lines), default=[None])

    def wait_for_group(self, size):
        """Waits until a step is completed in a group of so many processes."""
        limit = TimeLimit()
        while self.last_step()[-1] != size:
            assert not limit.passed(), self.processes[0].output
            time.sleep(0.02)

    def ends(self):
        """Asserts that all succeed, with the weights of an undisturbed run, one group at a time."""
        (self.shell.folder / "calm").touch()
        for process in self.processes:
            process.succeeds()
        assert self.coordinator.succeeds() == ""
        steps = sorted(step for steps in self.steps() for step in steps)
        torch.set_default_dtype(torch.float64)
        try:
            assert_trained(self.shell.folder / "snapshot.pt", self.epochs, 64, 1e-9)
        finally:
            torch.set_default_dtype(torch.float32)
        groups = [group for _, _, group, _ in steps]
        # Nobody begins a step in an older group. One that is frozen within a step may complete it.
        assert groups == sorted(groups)
        assert len({tuple(position) for _, position, _, _ in steps}) == self.epochs * 32
        return steps


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, 1])
def test_killed_and_joined(shell, num_workers):
    """Among the killed are rank 0, and all but one; one joins in the end."""
    training = Training(shell, 60, f"--num_workers {num_workers}")
    for size in (1, 2, 3):
        training.join()
        training.wait_for_group(size)
    for size in (2, 1):
        training.kill(training.processes[0])
        training.wait_for_group(size)
    training.join()
    training.wait_for_group(2)
    training.ends()


@pytest.mark.long
def test_frozen(shell):
    """A process that is stopped is left out, when the time-out and the patience have passed."""
    training = Training(shell, 60, patience=5)
    training.join()
    training.join()
    training.wait_for_group(2)
    frozen = training.processes.pop(0)
    os.kill(frozen.ranks[0].pid, signal.SIGSTOP)
    training.wait_for_group(1)
    os.kill(frozen.ranks[0].pid, signal.SIGCONT)
    assert frozen.wait() == 1
    assert "has left this process out" in frozen.output
    training.ends()


@pytest.mark.long
def test_a_bug_is_shown(shell):
    """An error of the script's own is raised, when the same step has failed ten times.

    Once, the others have died while a process forms its first group.
    """
    training = Training(shell, 60, setup=read_script("bug.py"))
    training.join()
    assert training.processes[0].wait() == 1
    output = training.processes[0].output
    assert "RuntimeError: a bug" in output
    assert output.count("regrouping: a bug") == 8
    assert output.count(": 1 processes") == 9


@pytest.mark.long
def test_gpu_has_nccl(shell):
    """Whose group takes no tensor that is on the CPU."""
    setup = "script.Trainer._run_batch = lambda *a: script.dist.all_reduce(torch.zeros(1))"
    training = Training(shell, 1, setup=setup)
    job = shell.ranks(training.command, **pretend_gpus(1))
    assert job.wait() == 1
    assert "No backend type associated with device type cpu" in job.output


def test_coordinator_is_gone(shell):
    """The processes end, and one has saved the last step."""
    training = Training(shell, 60, "--save_every_steps 100000")
    for size in (1, 2):
        training.join()
        training.wait_for_group(size)
    training.coordinator.end()
    for process in training.processes:
        process.fails("the coordinator is gone")
    assert position(shell.folder / "snapshot.pt") == tuple(training.last_step()[1])


def test_no_coordinator(shell):
    setup = (
        "real_timedelta = script.timedelta\nscript.timedelta = lambda **time: real_timedelta(0, 1)"
    )
    script = patch(shell.folder, "by_hand/regroup.py", setup)
    job = shell.ranks(f"{script} --coordinator localhost:{free_port()}")
    job.fails("no coordinator at localhost:")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("29400", "29400 is not an address such as node1:29400"),
        ("localhost:0 0", "the patience must be more than 0 and less than 1e6 seconds"),
        # What Debian's /etc/hosts says of a machine's own name.
        ("127.0.1.1:{port}", "only this machine can connect to 127.0.1.1"),
        ("host.invalid:{port}", "cannot listen on host.invalid"),
    ],
)
def test_bad_addresses(shell, arguments, message):
    arguments = arguments.format(port=free_port(2))
    shell.ranks(f"{ROOT}/by_hand/coordinator.py {arguments}").fails(message)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_twenty_kills(shell, seed):
    """At random moments, among 1 to 6 processes, which others join; some kills come in pairs."""
    rng = random.Random(seed)
    training = Training(shell, 200, patience=30)
    kills = []
    while len(kills) < 20:
        size = len(training.processes)
        if size > 1 and (size == 6 or rng.random() < 0.5):
            kills.append(training.kill(rng.choice(training.processes)))
        else:
            training.join()
        if rng.random() < 0.7:
            training.wait_for_group(len(training.processes))
            time.sleep(rng.random() / 10)  # not a wait, but a random moment
    steps = training.ends()
    for kill in kills:
        group = max((number for when, _, number, _ in steps if when < kill), default=0)
        # No later group: the killed process had only started.
        next_step = min((when for when, _, number, _ in steps if number > group), default=kill)
        assert next_step - kill < 30 + 3  # the patience and the time-out
