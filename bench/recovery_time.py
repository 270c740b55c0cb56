"""Seconds from the SIGKILL of one of three processes to the next step of the others, in three ways.

Each process is a node of its own: under torchrun with its default settings, under torchrun with
those of docs/elastic_ddp.md, and with recipes/regroup.py, in turn: python -m bench.recovery_time 10
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

from bench.launch import coordinator
from tools.launch.jobs import Job, TimeLimit

TIMEOUT_S = 300
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Runs a script in a process that tells what it has done so far. What each phase ends with is what
# both survivors have printed by then.
TIMED = """
import runpy, sys
print("python started", flush=True)
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
print("torch imported", flush=True)
init_process_group = dist.init_process_group
def init_and_tell(*args, **options):
    init_process_group(*args, **options)
    print("group of", dist.get_world_size(), flush=True)
dist.init_process_group = init_and_tell
destroy_process_group = dist.destroy_process_group
def tell_and_destroy():
    print("leaves the group", flush=True)
    destroy_process_group()
dist.destroy_process_group = tell_and_destroy
def tell_step(*args):
    print("step done", flush=True)
register_optimizer_step_post_hook(tell_step)
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
RESTART_PHASES = {
    "failure noticed": "Error",
    "rendezvous and restart": "python started",
    "torch imported": "torch imported",
    "group and first step": "step done",
}
REGROUP_PHASES = {"failure noticed": "leaves the group", "group and first step": "step done"}
FAST_CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"


class Way(NamedTuple):
    """A way to start the processes, and the phases of a recovery."""

    name: str
    phases: dict
    command: str


class Node(Job):
    """A started process, and how far its output is read."""

    position = 0

    def skip_output(self):
        self.position = len(self.output)

    def reads(self, mark):
        """Returns whether it has printed this since what was read last."""
        found = self.output.find(mark, self.position)
        if found >= 0:
            self.position = found + len(mark)
        return found >= 0


def wait(nodes, mark):
    """Waits until all have printed this, and returns the time."""
    limit = TimeLimit(TIMEOUT_S)
    left = nodes
    while left := [node for node in left if not node.reads(mark)]:
        if limit.passed():
            sys.exit(f"recovery_time.py: no {mark!r} in {limit.limit:.0f} s\n{left[0].output}")
        time.sleep(0.005)
    return time.monotonic()


def measure(way):
    """Kills one of three nodes; returns the seconds of each phase of the others."""
    command = way.command.format(run=uuid.uuid4().hex)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "timed").write_text(TIMED)
        nodes = [Node(command, Path(folder, name), VARIABLES) for name in "abc"]
        try:
            for mark in ("group of 3\n", *["step done"] * 20):
                wait(nodes, mark)
            *survivors, lost = nodes
            pids = lost.processes()
            for node in survivors:
                node.skip_output()
            killed = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            ends = [wait(survivors, mark) - killed for mark in way.phases.values()]
            return [end - start for start, end in zip([0, *ends], ends, strict=False)]
        finally:
            for node in nodes:
                node.end()


def ways(store_port, coordinator_port):
    torchrun = (
        "torchrun --nnodes=1:3 --nproc_per_node=1 --max-restarts=100 --rdzv_id={run}"
        f" --rdzv_backend=c10d --rdzv_endpoint=localhost:{store_port}"
    )
    script = "../timed elastic_ddp.py 100000 100000"
    regroup = "python ../timed recipes/regroup.py 100000 100000"
    return [
        Way("torchrun, its defaults", RESTART_PHASES, f"{torchrun} {script}"),
        Way("elastic_ddp.py", RESTART_PHASES, f"{torchrun} --rdzv_conf={FAST_CONF} {script}"),
        Way("regroup.py", REGROUP_PHASES, f"{regroup} --coordinator localhost:{coordinator_port}"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=10)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("rounds must be 1 or more")
    # Its store is in this process, so that any of the three nodes can be killed.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with coordinator() as port:
        rows = [(way, []) for way in ways(store.port, port)]
        for _ in range(args.rounds):
            for way, seconds in rows:
                seconds.append(measure(way))
    for way, seconds in rows:
        totals = [sum(phases) for phases in seconds]
        spread = f"{min(totals):.2f} to {max(totals):.2f}"
        print(f"{way.name}: {statistics.median(totals):.2f} s (of {len(totals)}, {spread})")
        for phase, of_rounds in zip(way.phases, zip(*seconds, strict=True), strict=True):
            print(f"  {statistics.median(of_rounds):6.2f} s  {phase}")


if __name__ == "__main__":
    main()
