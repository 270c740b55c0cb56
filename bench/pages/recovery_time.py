"""docs/by_hand/regroup.md: measures the seconds from a SIGKILL to the next step, in three ways

It kills one of three processes, each a node of its own: under torchrun with its default settings,
under torchrun with those of docs/elastic_ddp.md, and with by_hand/regroup.py, in turn.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path

from rankcheck.launch.jobs import TimeLimit, free_port
from torch.distributed import TCPStore

from tools.launch.jobs import Job
from tools.launch.patched import patch

TIMEOUT_S = 300
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Each process tells what it has done so far; each phase ends with what both survivors tell.
TELL = """
print("torch imported", flush=True)
@after(script.dist, "init_process_group")
def tell_size(*args, **options):
    print("group of", script.dist.get_world_size(), flush=True)
@before(script.dist, "destroy_process_group")
def tell_end():
    print("leaves the group", flush=True)
@after(torch.optim.SGD, "step")
def tell_step(*args):
    print("step done", flush=True)
"""
RESTART_PHASES = {
    "failure noticed": "Error",
    "rendezvous and restart": "python started",
    "torch imported": "torch imported",
    "group and first step": "step done",
}
REGROUP_PHASES = {"failure noticed": "leaves the group", "group and first step": "step done"}
FAST_CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"


class Node(Job):
    """A started process, and how far its output is read."""

    position = 0

    def skip_output(self):
        self.position = len(self.output)

    def read_to(self, mark):
        limit = TimeLimit(TIMEOUT_S)
        while (found := self.output.find(mark, self.position)) < 0:
            if limit.passed():
                sys.exit(f"recovery_time: no {mark!r} in {limit.limit:.0f} s\n{self.output}")
            time.sleep(0.005)
        self.position = found + len(mark)


def wait(nodes, mark):
    """Waits until all have printed this, after what is read; returns the time."""
    for node in nodes:
        node.read_to(mark)
    return time.monotonic()


def measure(command, phases):
    """Kills one of three nodes; returns the seconds of each phase of the others."""
    command = command.format(run=uuid.uuid4().hex)
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Node(command, Path(folder, name), VARIABLES) for name in "abc"]
        try:
            for mark in ("group of 3\n", *["step done"] * 20):
                wait(nodes, mark)
            *survivors, lost = nodes
            pids = lost.processes()
            for node in survivors:
                node.skip_output()
            times = [time.monotonic()]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            times += [wait(survivors, mark) for mark in phases.values()]
        finally:
            for node in nodes:
                node.end()
    return [end - start for start, end in pairwise(times)]


def write_scripts(folder):
    """Returns the command of each of two scripts that tell what they do."""
    for script in ("elastic_ddp.py", "by_hand/regroup.py"):
        path = patch(folder, script, TELL)
        path.write_text('print("python started", flush=True)\n' + path.read_text())
        yield f"{path} 100000 100000"


def report(rounds=10):
    # Its store is in this process, so that any of the three nodes can be killed.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torchrun = (
        "torchrun --nnodes=1:3 --nproc_per_node=1 --max-restarts=100 --rdzv_id={run}"
        f" --rdzv_backend=c10d --rdzv_endpoint=localhost:{store.port}"
    )
    port = free_port(2)  # the coordinator's, and its store's
    address = f"localhost:{port}"
    with tempfile.TemporaryDirectory() as folder:
        elastic, regroup = write_scripts(Path(folder))
        ways = {
            "torchrun, its defaults": (f"{torchrun} {elastic}", RESTART_PHASES),
            "elastic_ddp.py": (f"{torchrun} --rdzv_conf={FAST_CONF} {elastic}", RESTART_PHASES),
            "regroup.py": (f"python {regroup} --coordinator {address}", REGROUP_PHASES),
        }
        coordinator = Job(f"python by_hand/coordinator.py {address}", Path(folder), {})
        try:
            TCPStore("localhost", port + 1)  # the coordinator's: it listens
            found = [{name: measure(*way) for name, way in ways.items()} for _ in range(rounds)]
        finally:
            coordinator.end()
    for name, (_, phases) in ways.items():
        seconds = [of_round[name] for of_round in found]
        totals = [*map(sum, seconds)]
        spread = f"{min(totals):.2f} to {max(totals):.2f}"
        print(f"{name}: {statistics.median(totals):.2f} s (of {len(totals)}, {spread})")
        for phase, of_rounds in zip(phases, zip(*seconds, strict=True), strict=True):
            print(f"  {statistics.median(of_rounds):6.2f} s  {phase}")
