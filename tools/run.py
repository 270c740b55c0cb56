"""Trains with every stage in turn, each with its snapshot in runs/, and sums up in a table.

Every command is shown as one would type it; multinode.py runs as two "machines" that meet on
localhost. Ports are picked free, so that nothing on this machine is in the way.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading

import torch
from steps import ROOT, STEPS, changed_lines

SLURM = ("slurm-wlm", "munge", "iproute2")


# Where the two torchruns meet. If one of them held it, it would end with that one, and the other,
# were it a little late, would print a warning.
STORE = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def which(tool):
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def run(*commands):
    """Runs the commands side by side; returns what they print, and stops if one of them fails.

    A command may begin with NAME=value, as in a shell.
    """
    lines, processes, threads = [], [], []

    def echo(pipe, prefix):
        for line in pipe:
            print(prefix + line, end="", flush=True)
            lines.append(line)

    for number, command in enumerate(commands):
        prefix = f"machine {number}: " if len(commands) > 1 else ""
        print(f"{prefix}$ {command}", flush=True)
        process = subprocess.Popen(
            ["env", *shlex.split(command)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        threads.append(threading.Thread(target=echo, args=(process.stdout, prefix)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if any([process.wait() for process in processes]):
        sys.exit("the last command failed: see its output above")
    return "".join(lines)


def commands(script, gpus, epochs):
    """Returns the commands that start `script` on this machine: one, or one for each "machine"."""
    arguments = f"{script} {epochs} --snapshot_path runs/{script.removesuffix('.py')}.pt"
    if script == "singlegpu.py":
        return [f"python {arguments}"]
    if script == "multigpu.py":
        return [f"MASTER_PORT={free_port()} python {arguments}"]
    if script == "multigpu_torchrun.py":
        return [f"torchrun --standalone --nproc_per_node={min(gpus, 2) or 2} {arguments}"]
    meet = f"--rdzv_backend=c10d --rdzv_endpoint=localhost:{STORE.port} --rdzv_id=my_run"
    if gpus >= 2:  # two processes cannot share a GPU, so each "machine" gets one of its own
        launch = f"torchrun --nnodes=2 --nproc_per_node=1 {meet} {arguments}"
        return [f"CUDA_VISIBLE_DEVICES={gpu} {launch}" for gpu in range(2)]
    cpu = "CUDA_VISIBLE_DEVICES= " if gpus else ""
    return [f"{cpu}torchrun --nnodes=2 --nproc_per_node=2 {meet} {arguments}"] * 2


def main():
    shutil.rmtree(ROOT / "runs", ignore_errors=True)
    (ROOT / "runs").mkdir()
    print(f"$ export OMP_NUM_THREADS={os.environ.setdefault('OMP_NUM_THREADS', '1')}\n")
    changes = {STEPS[0].base: ""} | {s.file: str(changed_lines(s.base, s.file)) for s in STEPS}
    gpus = torch.cuda.device_count()
    epochs = " ".join(sys.argv[1:]) or "50 10"
    rows = []
    for script, changed in changes.items():
        losses = re.findall(r"epoch (\d+) \| loss (\S+)", run(*commands(script, gpus, epochs)))
        (first, loss), (last, final) = losses[0], losses[-1]
        rows.append([script, f"{loss} (epoch {first})", f"{final} (epoch {last})", changed])
        print()
    missing = [tool for tool in ("slurmctld", "munged", "ip") if not which(tool)]
    if missing:
        print(
            "For the same on a Slurm cluster of your own: sudo apt-get install", *SLURM, end="\n\n"
        )
    else:
        job = f"--gpus-per-node=1 slurm/multinode.sbatch {epochs} --snapshot_path runs/slurm.pt"
        run(f"slurm/pocket-cluster -n 2 sbatch {job}")
        log = max(ROOT.glob("multinode-*.out"), key=lambda path: path.stat().st_mtime)
        print(*re.findall(r"0: .+ epochs done.+|0: .+ saved .+", log.read_text()), "", sep="\n")
    rows.insert(0, ["stage", "first loss", "last loss", "changed lines"])
    for name, first, last, changed in rows:
        print(f"{name:<22}{first:<22}{last:<22}{changed}")


if __name__ == "__main__":
    main()
