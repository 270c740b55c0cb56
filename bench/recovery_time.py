"""Seconds from the SIGKILL of one of three nodes to the next step of the others, by phase.

With torchrun's default settings and with those of docs/elastic_ddp.md, in turn: recovery_time.py 10
Draws the medians of the second: --svg docs/assets/recovery.svg
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from figures import Picture
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parent.parent
# What each phase ends with: what so many of the two survivors have printed.
PHASES = {
    "failure noticed": ("Error", 2),
    "rendezvous and restart": ("python started", 2),
    "torch imported": ("torch imported", 2),
    "group and first step": (" samples |", 1),
}
# Runs the script in a process that tells what it has done so far.
TIMED = f"""
print("python started", flush=True)
import runpy, sys, torch
print("torch imported", flush=True)
runpy.run_path({str(ROOT / "elastic_ddp.py")!r}, run_name="__main__")
"""
FAST_CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
# The store is in this process, so that any of the three nodes can be killed.
STORE = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Node:
    def __init__(self, folder, name, run, settings):
        (folder / name).mkdir()
        (folder / name / "timed.py").write_text(TIMED)
        self.log = folder / name / "log"
        self.mark = f"NODE={uuid.uuid4()}"
        options = f"--nnodes=1:3 --nproc_per_node=1 --max-restarts=100 --rdzv_id={run}"
        rendezvous = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{STORE.port} {settings}"
        script = "timed.py 100000 100000 --save_every_steps 1"
        with self.log.open("w") as log:
            subprocess.Popen(
                f"torchrun {options} {rendezvous} {script}".split(),
                cwd=folder / name,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
                | dict([self.mark.split("=")]),
                stdout=log,
                stderr=log,
            )

    def kill(self):
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
            except OSError:
                continue

    def progress(self, world_size):
        """Returns whether its last world has this size, and whether rank 0 here has done steps."""
        tail = self.log.read_text().rpartition("\nrank ")[2]
        return f"of {world_size} starts" in tail, len(re.findall(r" samples \|", tail)) > 2


def wait(nodes, world_size, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while True:
        states = [node.progress(world_size) for node in nodes]
        if all(joined for joined, _ in states) and any(stepped for _, stepped in states):
            return
        if time.monotonic() > deadline:
            sys.exit("recovery_time.py: no step within 300 s\n" + nodes[0].log.read_text())
        time.sleep(0.02)


def measure(settings):
    """Returns the seconds of each phase."""
    folder = Path(tempfile.mkdtemp())
    run = uuid.uuid4().hex
    nodes = [Node(folder, name, run, settings) for name in "abc"]
    try:
        wait(nodes, 3)
        read = [len(node.log.read_text()) for node in nodes[:2]]
        killed = time.monotonic()
        nodes.pop().kill()
        seconds = []
        for mark, count in PHASES.values():
            while sum(mark in tail for tail in tails(nodes, read)) < count:
                if time.monotonic() > killed + 300:
                    sys.exit("recovery_time.py: no step within 300 s\n" + nodes[0].log.read_text())
                time.sleep(0.01)
            seconds.append(time.monotonic() - killed - sum(seconds))
            if mark == "Error":  # the last step is saved once more
                read = [len(node.log.read_text()) for node in nodes]
        return seconds
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder)


def tails(nodes, read):
    """Returns what each node has printed since so many characters."""
    return [node.log.read_text()[n:] for node, n in zip(nodes, read, strict=True)]


def draw(seconds, path):
    """Draws the phases on a time axis, which begins with the kill."""
    picture = Picture(400, 164, "What happens after a kill, in seconds")
    pixels = 220 / sum(seconds)
    start = left = 160
    for row, (name, duration) in enumerate(zip(PHASES, seconds, strict=True)):
        picture.text(4, 22 + 26 * row, name)
        picture.box(start, 6 + 26 * row, duration * pixels, 22, "ab"[row % 2])
        start += duration * pixels
    picture.arrow_right(left, 120, 236)
    for second in range(0, int(sum(seconds)) + 1, 2):
        picture.path(f"M{left + second * pixels:.1f} 117 v6")
        picture.text(left + second * pixels, 140, second, "")
    picture.text(270, 158, "seconds since the kill", "")
    picture.save(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", nargs="?", type=int, default=10)
    parser.add_argument("--svg", type=Path, default=Path("runs/recovery.svg"), help="where to draw")
    args = parser.parse_args()
    fast = f"--rdzv_conf={FAST_CONF}"
    settings_by_name = {"torchrun's defaults": "", fast: fast}
    seconds = {name: [] for name in settings_by_name}
    for number in range(args.rounds):
        for name, settings in settings_by_name.items():
            if settings or number < max(1, args.rounds // 5):  # the defaults take minutes
                seconds[name].append(measure(settings))
    for name, rows in seconds.items():
        totals = [sum(row) for row in rows]
        spread = f"{min(totals):.1f} to {max(totals):.1f}"
        print(f"{name}: {statistics.median(totals):.1f} s (median of {len(rows)}, {spread})")
        for phase, values in zip(PHASES, zip(*rows, strict=True), strict=True):
            print(f"  {statistics.median(values):5.1f} s  {phase}")
    args.svg.parent.mkdir(exist_ok=True)
    draw([statistics.median(values) for values in zip(*seconds[fast], strict=True)], args.svg)


if __name__ == "__main__":
    main()
