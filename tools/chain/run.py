"""Trains with every stage in turn, each with its snapshot in runs/chain/, and sums up in a table.

All take global batches of 32 samples, and so log the same losses. elastic_ddp.py trains on the CPU,
and so does a stage with more processes than GPUs. Every command is shown as one would type it;
multinode.py, resumable.py and preemptible.py run as two "nodes" with their rendezvous on localhost,
and elastic_ddp.py as three, of which one is killed on the way. Ports are picked free. --no-slurm
leaves out the job on a pocket cluster at the end.
"""

import argparse
import os
import re
import shutil
import sys
import time

import torch
from rankcheck.launch.jobs import kill

from tools.launch.jobs import Job, missing_packages
from tools.steps import ROOT, STEPS, changed_lines

FOLDER = ROOT / "runs" / "chain"
TOTAL_EPOCHS, SAVE_EVERY = 50, 10
EPOCHS = f"{TOTAL_EPOCHS} {SAVE_EVERY}"
GLOBAL_BATCH_SIZE = 32

# The store of every rendezvous. In one of the torchruns it would end with that one, and another
# that ends a little later would print a warning.
STORE = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def run(*commands, show=".", kill_at=None):
    """Runs the commands side by side; returns what they print, and stops if one of them fails.

    A command may begin with NAME=value, as in a shell. `show`, a regular expression, picks the
    lines to print; at the first with `kill_at` in it, the last command is killed.
    """
    jobs = []
    for number, command in enumerate(commands):
        prefix = f"node {number}: " if len(commands) > 1 else ""
        print(f"{prefix}$ {command}", flush=True)
        jobs.append(Job(command, ROOT, {}, log=FOLDER / f"node_{number}.log"))
    shown = [0] * len(jobs)  # lines of each
    killed = None
    running = True
    while running:
        running = any(job.status() is None for job in jobs)
        for number, job in enumerate(jobs):
            lines = [line for line in job.output.splitlines(True) if line.endswith("\n")]
            for line in lines[shown[number] :]:
                if re.search(show, line):
                    print(f"node {number}: {line}" if len(jobs) > 1 else line, end="", flush=True)
                if kill_at and kill_at in line and not killed:
                    killed = jobs[-1]
                    print(f"node {len(jobs) - 1}: is killed now", flush=True)
                    kill(killed.process.pid)
            shown[number] = len(lines)
        time.sleep(0.01)
    if any(job.status() for job in jobs if job is not killed):
        sys.exit("the last command failed: see its output above")
    return "".join(job.output for job in jobs)


def commands(script, gpus):
    """Returns the commands that start `script` on this machine: one, or one for each "node"."""
    arguments = f"{script} {EPOCHS} --snapshot_path runs/chain/{script.removesuffix('.py')}.pt"
    if script == "singlegpu.py":
        return [f"python {arguments}"]
    processes = min(gpus, 2) or 2
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    of_two = f"{arguments} --batch_size {GLOBAL_BATCH_SIZE // processes}"
    if script == "multigpu.py":
        first_two = f"CUDA_VISIBLE_DEVICES={','.join(visible)} " if gpus > 2 else ""
        return [f"{first_two}python {of_two}"]
    if script == "multigpu_torchrun.py":
        return [f"torchrun --standalone --nproc_per_node={processes} {of_two}"]
    rendezvous = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{STORE.port} --rdzv_id={script}"
    if script == "elastic_ddp.py":
        # See docs/elastic_ddp.md.
        rdzv_conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
        options = f"--nnodes=1:3 --nproc_per_node=1 --max-restarts=100 --rdzv_conf={rdzv_conf}"
        torchrun = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun"
        of_all = f"{arguments} --global_batch_size {GLOBAL_BATCH_SIZE} --save_every_steps 16"
        launch = f"{torchrun} {options} {rendezvous} {of_all}"
        cpu = "CUDA_VISIBLE_DEVICES= " if gpus else ""
        return [f"{cpu}{launch}"] * 3
    if gpus >= 2:  # two processes cannot share a GPU, so each "node" gets one of its own
        launch = f"torchrun --nnodes=2 --nproc_per_node=1 {rendezvous} {of_two}"
        return [f"CUDA_VISIBLE_DEVICES={gpu} {launch}" for gpu in visible]
    cpu = "CUDA_VISIBLE_DEVICES= " if gpus else ""
    of_four = f"{arguments} --batch_size {GLOBAL_BATCH_SIZE // 4}"
    return [f"{cpu}torchrun --nnodes=2 --nproc_per_node=2 {rendezvous} {of_four}"] * 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-slurm", action="store_true", help="leave out the pocket cluster")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    print(f"$ export OMP_NUM_THREADS={os.environ.setdefault('OMP_NUM_THREADS', '1')}\n")
    changes = {STEPS[0].base: ""} | {s.file: str(changed_lines(s.base, s.file)) for s in STEPS}
    gpus = torch.cuda.device_count()
    rows = [["stage", "trained on", "first loss", "last loss", "changed lines"]]
    for script, changed in changes.items():
        if script == "elastic_ddp.py":  # whose log is long
            show = r" starts: torch|epochs done| \+ 0 samples"
            output = run(*commands(script, gpus), show=show, kill_at=f"epoch {SAVE_EVERY} + 0")
        else:
            output = run(*commands(script, gpus))
        losses = dict(re.findall(r"epoch ([1-9]\d*)(?: \+ 0 samples)? \| loss (\S+)", output))
        first, last = (f"{losses[str(n)]} (epoch {n})" for n in (SAVE_EVERY, TOTAL_EPOCHS))
        device = re.search(r"steps per epoch, on (cpu|cuda)", output)[1]
        rows.append([script, device, first, last, changed])
        print()
    if missing := missing_packages():
        install = f"sudo apt-get install {' '.join(missing)}"
        print(f"For the same on a Slurm cluster of your own: {install}\n")
    elif not args.no_slurm:
        arguments = f"{EPOCHS} --snapshot_path runs/chain/slurm.pt"
        sbatch = "sbatch --gpus-per-node=1 slurm/multinode.sbatch"
        run(f"slurm/pocket-cluster -n 2 {sbatch} {arguments}")
        log = max(ROOT.glob("multinode-*.out"), key=lambda path: path.stat().st_mtime)
        print(*re.findall(r"0: .+ epochs done.+|0: .+ saved .+", log.read_text()), "", sep="\n")
    for name, device, first, last, changed in rows:
        print(f"{name:<22}{device:<12}{first:<21}{last:<23}{changed}")


if __name__ == "__main__":
    main()
