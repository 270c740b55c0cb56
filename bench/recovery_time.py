"""Seconds from the SIGKILL of one of three processes to the next step of the others, in three ways.

Each process is a node of its own: under torchrun with its default settings, under torchrun with
those of docs/elastic_ddp.md, and with recipes/regroup.py, in turn: recovery_time.py 10
Draws the medians, by phase: runs/recovery.svg
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))
from tools.launch.processes import environments  # noqa: E402
from tools.pages.charts import draw  # noqa: E402

TIMEOUT_S = 300
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


class Way:
    """A way to start the processes, and the phases of a recovery."""

    def __init__(self, name, phases, command):
        self.name = name
        self.phases = phases
        self.command = command

    def measure(self):
        """Kills one of three processes; returns the seconds of each phase of the others."""
        folder = Path(tempfile.mkdtemp())
        run = uuid.uuid4().hex
        nodes = [Node(folder / name, self.command.format(run=run)) for name in "abc"]
        try:
            for mark in ("group of 3\n", *["step done"] * 20):
                wait(nodes, mark)
            pids = nodes[-1].pids()
            for node in nodes:
                node.skip_output()
            killed = time.monotonic()
            nodes.pop().kill(pids)
            ends = [wait(nodes, mark) - killed for mark in self.phases.values()]
            return [end - start for start, end in zip([0, *ends], ends, strict=False)]
        finally:
            for node in nodes:
                node.kill(node.pids())
            shutil.rmtree(folder)


class Node:
    def __init__(self, folder, command):
        folder.mkdir()
        (folder / "timed.py").write_text(TIMED)
        log = folder / "log"
        self.mark = f"NODE={uuid.uuid4()}"
        with log.open("w") as file:
            self.process = subprocess.Popen(
                shlex.split(command),
                cwd=folder,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
                | dict([self.mark.split("=")]),
                stdout=file,
                stderr=file,
            )
        self.log = log.open()
        self.unread = ""

    def pids(self):
        """Returns the process ids of this node: torchrun and its worker, or the script alone."""
        return [pid for pid, text in environments().items() if self.mark in text]

    def kill(self, pids):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def skip_output(self):
        self.log.read()
        self.unread = ""

    def reads(self, mark):
        """Returns whether it has printed this since what was read last."""
        self.unread += self.log.read()
        _, found, after = self.unread.partition(mark)
        if found:
            self.unread = after
        return bool(found)


def wait(nodes, mark):
    """Waits until all have printed this, and returns the time."""
    deadline = time.monotonic() + TIMEOUT_S
    left = nodes
    while left := [node for node in left if not node.reads(mark)]:
        if time.monotonic() > deadline:
            sys.exit(f"recovery_time.py: no {mark!r} in {TIMEOUT_S} s\n{left[0].unread}")
        time.sleep(0.005)
    return time.monotonic()


def ways(store_port, coordinator_port):
    torchrun = (
        "torchrun --nnodes=1:3 --nproc_per_node=1 --max-restarts=100 --rdzv_id={run}"
        f" --rdzv_backend=c10d --rdzv_endpoint=localhost:{store_port}"
    )
    root, python = shlex.quote(str(ROOT)), shlex.quote(sys.executable)
    script = f"timed.py {root}/elastic_ddp.py 100000 100000"
    regroup = f"timed.py {root}/recipes/regroup.py 100000 100000"
    coordinator = f"--coordinator localhost:{coordinator_port}"
    return [
        Way("torchrun, its defaults", RESTART_PHASES, f"{torchrun} {script}"),
        Way("elastic_ddp.py", RESTART_PHASES, f"{torchrun} --rdzv_conf={FAST_CONF} {script}"),
        Way("regroup.py", REGROUP_PHASES, f"{python} {regroup} {coordinator}"),
    ]


def start_coordinator():
    """Returns the process, once it listens, and its port."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    script = ROOT / "recipes" / "coordinator.py"
    process = subprocess.Popen([sys.executable, script, f"localhost:{port}"])
    TCPStore("localhost", port + 1)  # waits for it
    return process, port


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=10)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("rounds must be 1 or more")
    # Its store is in this process, so that any of the three nodes can be killed.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    coordinator, port = start_coordinator()
    rows = {way: [] for way in ways(store.port, port)}
    try:
        for _ in range(args.rounds):
            for way in rows:
                rows[way].append(way.measure())
    finally:
        coordinator.kill()
    medians = {}
    for way, seconds in rows.items():
        totals = [sum(phases) for phases in seconds]
        spread = f"{min(totals):.2f} to {max(totals):.2f}"
        print(f"{way.name}: {statistics.median(totals):.2f} s (of {len(totals)}, {spread})")
        by_phase = map(statistics.median, zip(*seconds, strict=True))
        medians[way.name] = dict(zip(way.phases, by_phase, strict=True))
        for phase, median in medians[way.name].items():
            print(f"  {median:6.2f} s  {phase}")
    draw("recovery", medians, ROOT / "runs")


if __name__ == "__main__":
    main()
