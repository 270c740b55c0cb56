"""Breaks a training on three nodes again and again, and judges what comes of it: storm.py 20

Starts slurm/elastic_ddp.sbatch on a pocket cluster, without a shared disk, and does to it what
happens to machines: so many faults, each of a random kind, on a random node, at a random moment,
half of them before it is up again. Every kind comes once before one comes again. The verdict: has
it ever gone back behind a snapshot that it told of, and are the weights at the end those of
singlegpu.py, which nothing disturbs? Both calculate in float64, in copies of the scripts in
runs/storm-SEED: in float32 the roundings of so many steps are not small beside a fault's traces.
"""

import argparse
import collections
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from steps import ROOT

NODES = ("node1", "node2", "node3")
SNAPSHOT = "/dev/shm/snapshot.pt"  # on each node its own
LIMIT = 300  # seconds without a word in the log: several times what the slowest fault costs


def run(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


def kill(node, mark="SLURM_STEP_ID=", number=signal.SIGKILL):
    """Signals the node's processes that have `mark` in their environment or command line."""
    keeper = (Path(shutil.which("on")).parent.parent / node / "pid").read_text().strip()
    network = os.stat(f"/proc/{keeper}/ns/net").st_ino
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if os.stat(process / "ns" / "net").st_ino == network and mark.encode() in text:
                os.kill(int(process.name), number)
        except OSError:
            continue  # it has just ended


# What can happen to a node; the storm says the docstrings.


def crash(node, job):
    """torchrun and its ranks killed"""
    kill(node)


def crash_of_all(node, job):
    """torchrun and its ranks killed on every node"""
    for name in NODES:
        kill(name)


def crash_of_rank(node, job):
    """one rank killed"""
    kill(node, "LOCAL_RANK=0")


def crash_of_store(node, job):
    """torchrun and its ranks killed, and the store by which the nodes meet"""
    kill("node1", "wait_for_workers=False")
    kill(node)


def goodbye(node, job):
    """SIGTERM to torchrun and its ranks"""
    kill(node, number=signal.SIGTERM)


def half_a_snapshot(node, job):
    """snapshot cut short, then torchrun and its ranks killed"""
    run("on", node, "truncate", "--size=1K", SNAPSHOT)
    kill(node)


def cable(node, job):
    """cable pulled for 5 seconds"""
    run("ip", "link", "set", node, "down")
    time.sleep(5)
    run("ip", "link", "set", node, "up")


def power(node, job):
    """power cut for 5 seconds"""
    run("power", "off", node)
    time.sleep(5)
    run("power", "on", node)


def requeue(node, job):
    """scontrol requeue of the job"""
    run("scontrol", "requeue", job)


def preemption(node, job):
    """preempted by a job that is more urgent"""
    urgent = "sbatch --partition=urgent --exclusive --nodes=3 --output=urgent.out --wrap hostname"
    run(*urgent.split())


KINDS = {
    kind.__name__: kind
    for kind in (
        crash,
        crash_of_all,
        crash_of_rank,
        crash_of_store,
        goodbye,
        half_a_snapshot,
        cable,
        power,
        requeue,
        preemption,
    )
}


class Storm:
    def __init__(self, args):
        self.args = args
        self.started, self.hurried = time.monotonic(), -math.inf
        epochs = f"{args.epochs} {args.epochs}"
        command = f"--gpus-per-node=1 slurm/elastic_ddp.sbatch {epochs}"
        command += f" --save_steps 16 --snapshot_path {SNAPSHOT}"
        self.say(f"$ sbatch {command}")
        self.job = run("sbatch", "--parsable", *command.split()).strip()
        self.log = Path(f"elastic_ddp-{self.job}.out")

    def say(self, text):
        print(f"{time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def running(self):
        """Returns whether the job is in the queue; a requeued one need not wait for two minutes."""
        command = ["squeue", "--noheader", f"--jobs={self.job}", "--format=%T %r"]
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode:  # a controller that is too busy to answer is no end of the job
            return "Invalid job id" not in answer.stderr
        state = answer.stdout.split()
        if state == ["PENDING", "BeginTime"] and time.monotonic() > self.hurried + 10:
            run("scontrol", "update", f"JobId={self.job}", "StartTime=now+3")
            self.hurried = time.monotonic()
        return bool(state)

    def read(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def positions(self):
        """Returns epoch and sample of each snapshot that the log tells of."""
        found = re.findall(r"epoch (\d+) \+ (\d+) samples", self.read())
        return [(int(epoch), int(samples)) for epoch, samples in found]

    def position(self):
        return "after epoch {}, sample {}".format(*[(0, 0), *self.positions()][-1])

    def wait(self, ready=lambda: False):
        """Waits until `ready()` or until the job has ended."""
        text, heard = "", time.monotonic()
        while self.running() and not ready():
            if self.read() != text:
                text, heard = self.read(), time.monotonic()
            if time.monotonic() > heard + LIMIT:
                sys.exit(f"storm: nothing has happened for {LIMIT} s: see {self.log}")
            time.sleep(0.2)

    def blow(self):
        """Returns how many faults of each kind came before the job's end."""
        chance, done = random.Random(self.args.seed), collections.Counter()
        self.wait(lambda: "epochs done" in self.read())
        kinds = []
        for _ in range(self.args.faults):
            kinds = kinds or chance.sample(self.args.kinds, len(self.args.kinds))
            told = len(self.positions())
            if chance.random() < 0.5:
                self.wait(lambda told=told: len(self.positions()) > told)
            moment = time.monotonic() + chance.uniform(0, 10)
            self.wait(lambda moment=moment: time.monotonic() > moment)
            kind, node = KINDS[kinds.pop()], chance.choice(NODES)
            if not self.running():
                break
            self.say(f"{node}: {kind.__doc__}, {self.position()}")
            kind(node, self.job)
            done[kind.__name__] += 1
        self.say("the storm is over")
        self.wait()
        return done


def prepare(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("slurm", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    for script in ("singlegpu.py", "elastic_ddp.py"):
        last_import = "from tqdm import tqdm\n"
        before, found, after = (ROOT / script).read_text().partition(last_import)
        assert found, script
        text = f"{before}{found}\ntorch.set_default_dtype(torch.float64)\n{after}"
        (folder / script).write_text(text)


def newest_snapshot():
    """Returns the newest of the nodes' snapshots."""
    found = []
    for node in NODES:
        copy = Path(f"{node}.pt")
        run("on", node, "cp", SNAPSHOT, str(copy))
        if copy.exists():
            found.append(torch.load(copy, weights_only=True))
    return max(found, key=lambda snapshot: (snapshot["epochs_run"], snapshot["samples_run"]))


def inside(args):
    storm = Storm(args)
    faults = storm.blow()
    state = re.search(r"JobState=(\w+)", run("scontrol", "show", "job", storm.job))[1]
    storm.say(f"job {state} {storm.position()}; the same without faults ...")
    epochs = [str(args.epochs)] * 2
    run(
        sys.executable,
        "singlegpu.py",
        *epochs,
        "--batch_size=64",
        "--snapshot_path=plain.pt",
    )
    weights, plain = newest_snapshot()["model"], torch.load("plain.pt", weights_only=True)["model"]
    furthest = max((weights[name] - plain[name]).abs().max().item() for name in plain)
    print(*(f"{number} x {KINDS[name].__doc__}" for name, number in faults.items()), sep="\n")
    good = state == "COMPLETED" and furthest < 1e-9 and faults.total() == args.faults
    if storm.positions() != sorted(storm.positions()):
        good = print("BAD: it went back behind a snapshot")
    print(
        f"{faults.total()} of {args.faults} faults, seed {args.seed}: job {state}, largest", end=" "
    )
    print(f"difference of a weight {furthest:.2g}: {'good' if good else 'BAD'}")
    sys.exit(not good)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="?", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--epochs", type=int, help="40 a fault, if not given")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.epochs = args.epochs or 40 * args.faults
    folder = ROOT / "runs" / f"storm-{args.seed}"
    if args.inside:
        os.chdir(folder)
        inside(args)
    prepare(folder)
    command = [ROOT / "slurm" / "pocket-cluster", "-n", "3", "-g", "1", sys.executable, __file__]
    sys.exit(subprocess.call([*command, *sys.argv[1:], "--seed", str(args.seed), "--inside"]))


if __name__ == "__main__":
    main()
