"""Injects faults into a training on three nodes and checks what comes out: chaos.py 20

Starts slurm/elastic_ddp.sbatch on a pocket cluster and injects so many faults, each of a random
type, on a random node, at a random moment, half of them before the job is up again. Every type
comes once before one comes again. After the last one, the ranks are restarted, and train some
epochs more: the job lasts as long as the faults do, on any machine. The snapshot is on a shared
disk or, with --local-disks, each node has its own. At the end: did the job ever resume from an
older snapshot than it had logged, and are its weights those of singlegpu.py, undisturbed? Both
compute in float64, since in float32 the rounding of so many steps would hide a fault's traces.
every_kill.py kills ranks, at each point.
"""

import argparse
import collections
import contextlib
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

from rankcheck.launch.jobs import environments

from tools.launch.snapshots import load, logged_positions, max_abs_diff
from tools.steps import ROOT

NODES = ("node1", "node2", "node3")
LOCAL_SNAPSHOT = "/dev/shm/snapshot.pt"  # on each node its own
EPOCHS = 10**6  # more than it trains until all faults are injected
EPOCHS_AFTER = 40
TOTAL = Path("total_epochs")  # the scripts read it when they start
LOG_LINES = 40  # of each daemon, after a failure
TIMEOUT_S = 400  # without a new snapshot in the log: several times what the slowest fault costs


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def kill(node, mark="SLURM_STEP_ID="):
    """Kills the node's processes with `mark`, a pattern, in their environment or command line."""
    init_pid = (Path(shutil.which("on")).parent.parent / node / "pid").read_text().strip()
    network = os.stat(f"/proc/{init_pid}/ns/net").st_ino
    for pid, environment in environments().items():
        with contextlib.suppress(OSError):  # it has just ended
            text = environment + Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if os.stat(f"/proc/{pid}/ns/net").st_ino == network and re.search(mark, text):
                os.kill(pid, signal.SIGKILL)


def print_records(job):
    """Prints what Slurm knows of the job, and the ends of its daemons' logs."""
    print(run("squeue"), run("sinfo"), run("scontrol", "show", "job", job))
    for name in ("slurmctld", *NODES):
        lines = (Path(shutil.which("on")).parent.parent / "log" / name).read_text().splitlines()
        lines = [line for line in lines if "auth_p_get_host" not in line]  # of each command
        print(f"{name}:", *lines[-LOG_LINES:], sep="\n  ")


# The fault types; chaos.py prints their docstrings.


def crash(node, job):
    """torchrun and its ranks killed"""
    kill(node)


def crash_of_slurmstepd(node, job):
    """slurmstepd, which starts a step's tasks, killed with them"""
    kill(node, r"slurmstepd: \[\d+\.\d+\]")  # not that of the job file
    kill(node)


def network_outage(node, job):
    """network down for 5 seconds"""
    run("ip", "link", "set", node, "down")
    time.sleep(5)
    run("ip", "link", "set", node, "up")


def short_power_cut(node, job):
    """power cut for 3 seconds: Slurm does not notice it"""
    run("power", "off", node)
    time.sleep(3)
    run("power", "on", node)


def long_power_cut(node, job):
    """power cut for 25 seconds: Slurm gives the node up"""
    run("power", "off", node)
    time.sleep(25)
    run("power", "on", node)


def requeue(node, job):
    """scontrol requeue of the job"""
    run("scontrol", "requeue", job)


def preemption(node, job):
    """preempted by a job that is more urgent"""
    urgent = "sbatch --partition=urgent --exclusive --nodes=3 --output=urgent.out --wrap hostname"
    run(*urgent.split())


FAULT_TYPES = [crash, crash_of_slurmstepd, network_outage, short_power_cut, long_power_cut]
FAULT_TYPES += [requeue, preemption]


class ChaosRun:
    def __init__(self, args):
        self.args = args
        self.started = time.monotonic()
        self.last_explained = time.monotonic()  # when a reason was known why the job does not run
        self.starts, self.last_start = 0, -math.inf  # of ranks
        script = "own_disks.py" if args.local_disks else "elastic_ddp.py"
        command = f"--gpus-per-node=1 elastic_ddp.sbatch {script}"
        command += f" {EPOCHS} {EPOCHS} --save_every_steps 16 --timeout 30"
        if args.local_disks:
            command += f" --snapshot_path {LOCAL_SNAPSHOT}"
        self.log_event(f"$ sbatch {command}")
        self.job = run("sbatch", "--parsable", *command.split()).strip()
        self.log = Path(f"elastic_ddp-{self.job}.out")

    def log_event(self, text):
        print(f"{time.monotonic() - self.started:5.0f} s  {text}", flush=True)

    def running(self):
        """Returns whether the job is in the queue.

        A requeued one waits for 16 s, by the cluster's cred_expire. If it started sooner, a slurmd
        that ends the former life, and looks every 10 s whether it has, might end the new one, too.
        """
        command = ["squeue", "--noheader", f"--jobs={self.job}", "--format=%T %r"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if answer.returncode:  # a controller that is too busy to answer is no end of the job
            return "Invalid job id" not in answer.stderr
        state = answer.stdout.split()
        if state != ["PENDING", "Resources"] or set(run("sinfo", "-ho%t").split()) != {"idle"}:
            self.last_explained = time.monotonic()
        elif time.monotonic() > self.last_explained + 10:
            # docs/elastic_job.md: Slurm 22.05 counts GPUs of an earlier life as used. A user would
            # need other nodes, or the administrator, for whom this command counts them anew.
            self.log_event("Slurm has lost the job's GPUs: scontrol reconfigure")
            run("scontrol", "reconfigure")
            self.last_explained = time.monotonic()
        return bool(state)

    def read(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def positions(self):
        return logged_positions(self.read())

    def never_older(self):
        """Returns whether every start of the training resumed from what was saved last."""
        newest = (0, 0)
        for start in self.read().split("epochs done")[1:]:
            saved = logged_positions(start)
            if min(saved, default=newest) < newest:
                return False
            newest = max(saved, default=newest)
        return True

    def wait_for_snapshot(self):
        saved = len(self.positions())
        self.wait(lambda: len(self.positions()) > saved)

    def settled(self):
        """Returns whether the job runs, is not about to be requeued, and no other job is left.

        Where a node has left it, srun may end it a minute later.
        """
        sizes = re.findall(r"rank \d of (\d) on \S+ starts", self.read())
        if len(sizes) != self.starts:
            self.starts, self.last_start = len(sizes), time.monotonic()
        complete = sizes[-1:] == [str(len(NODES))]
        queue = run("squeue", "--noheader", "--format=%i %T").split()
        stays = complete or time.monotonic() > self.last_start + 90
        return stays and queue == [self.job, "RUNNING"]

    def position(self):
        return "after epoch {}, sample {}".format(*[(0, 0), *self.positions()][-1])

    def wait(self, ready=lambda: False):
        """Waits until `ready()` or until the job has ended."""
        saved = 0
        last_saved = time.monotonic()
        while self.running() and not ready():
            if len(self.positions()) > saved:
                saved = len(self.positions())
                last_saved = time.monotonic()
            if time.monotonic() > last_saved + TIMEOUT_S:
                print_records(self.job)
                sys.exit(f"chaos: no new snapshot in {TIMEOUT_S} s: see {self.log}")
            time.sleep(0.2)

    def inject_faults(self):
        """Returns how many faults of each type were injected before the job's end."""
        rng = random.Random(self.args.seed)
        injected = collections.Counter()
        self.wait(lambda: "epochs done" in self.read())
        fault_types = []
        for _ in range(self.args.faults):
            fault_types = fault_types or rng.sample(FAULT_TYPES, len(FAULT_TYPES))
            if rng.random() < 0.5:
                self.wait_for_snapshot()
            moment = time.monotonic() + rng.uniform(0, 10)
            self.wait(lambda moment=moment: time.monotonic() > moment)
            fault = fault_types.pop()
            node = rng.choice(NODES)
            if not self.running():
                break
            self.log_event(f"{node}: {fault.__doc__}, {self.position()}")
            fault(node, self.job)
            injected[fault] += 1
        self.log_event("all faults are injected")
        self.end_soon()
        return injected

    def end_soon(self):
        """Kills all ranks when they have saved after the last fault; torchrun restarts them."""
        self.wait(self.settled)
        self.wait_for_snapshot()
        epochs, _ = max(self.positions(), default=(0, 0))
        TOTAL.write_text(str(epochs + EPOCHS_AFTER))
        for node in NODES:
            kill(node, "LOCAL_RANK=")
        self.log_event(f"restarted, {self.position()}: continues to epoch {epochs + EPOCHS_AFTER}")
        self.wait()


def prepare(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    shutil.copy(ROOT / "slurm" / "elastic_ddp.sbatch", folder)
    (folder / "slurm").mkdir()
    shutil.copy(ROOT / "slurm" / "setup.sh", folder / "slurm")
    requeue = (ROOT / "slurm" / "requeue.sh").read_text()
    before, limit, after = requeue.partition("limit=2")
    assert limit, "requeue.sh has another limit now"
    # Faults so close to each other leave many lives no time to save.
    (folder / "slurm" / "requeue.sh").write_text(f"{before}{limit}00{after}")
    (folder / "slurm" / "requeue.sh").chmod(0o755)
    for script in ("singlegpu.py", "elastic_ddp.py", "recipes/own_disks.py"):
        (folder / Path(script).name).write_text(
            "import pathlib, runpy, sys, torch\n"
            "torch.set_default_dtype(torch.float64)\n"
            f"total = pathlib.Path({str(TOTAL)!r})\n"
            "sys.argv[1] = total.read_text() if total.exists() else sys.argv[1]\n"
            f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
        )


def newest_snapshot(local_disks):
    """Returns the snapshot, or the newest of the nodes' snapshots."""
    if not local_disks:
        return load("snapshot.pt")
    found = []
    for node in NODES:
        copy = Path(f"{node}.pt")
        run("on", node, "cp", LOCAL_SNAPSHOT, str(copy))
        if copy.exists():
            found.append(load(copy))
    return max(found, key=lambda snapshot: (snapshot["epochs_run"], snapshot["samples_run"]))


def inside(args):
    chaos = ChaosRun(args)
    faults = chaos.inject_faults()
    state = re.search(r"JobState=(\w+)", run("scontrol", "show", "job", chaos.job))[1]
    if state != "COMPLETED":
        print_records(chaos.job)
    chaos.log_event(f"job {state} {chaos.position()}; the same without faults ...")
    options = f"{EPOCHS} {EPOCHS} --batch_size=64 --snapshot_path=reference.pt"
    command = [sys.executable, "singlegpu.py", *options.split()]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=3600)
    weights = newest_snapshot(args.local_disks)["model"].values()
    diff = max_abs_diff(weights, load("reference.pt")["model"].values())
    for fault, count in faults.items():
        print(f"{count} x {fault.__doc__}")
    never_older = chaos.never_older()
    if not never_older:
        print("BAD: it resumed from an older snapshot")
    complete = state == "COMPLETED" and faults.total() == args.faults
    passed = complete and never_older and diff < 1e-9
    verdict = f"job {state}, weights differ by at most {diff:.2g}"
    print(f"{faults.total()} of {args.faults} faults, seed {args.seed}: {verdict}:", end=" ")
    print("good" if passed else "BAD")
    sys.exit(not passed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="?", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--local-disks", action="store_true", help="no disk is shared")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.faults < 1:
        parser.error("faults must be 1 or more")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    disks = "local" if args.local_disks else "shared"
    folder = ROOT / "runs" / f"chaos-{disks}-{args.seed}"
    if args.inside:
        os.chdir(folder)
        inside(args)
    prepare(folder)
    cluster = [ROOT / "slurm" / "pocket-cluster", "-n", "3", "-g", "1"]
    command = [*cluster, sys.executable, "-m", "tests.faults.chaos", *sys.argv[1:]]
    sys.exit(subprocess.call([*command, "--seed", str(args.seed), "--inside"]))


if __name__ == "__main__":
    main()
