"""Submit any stage that torchrun can start, from Python, with submitit:

    python slurm/submit.py --nodes 2 --gpus_per_node 4 multinode.py 50 10
    python slurm/submit.py --nodes 2 --gpus_per_node 4 --cluster local multinode.py 50 10

The first submits a Slurm job, the second runs the same on this machine, a torchrun for each node. A
Slurm job that is preempted, or runs out of time, goes back to the queue, and on from its snapshot.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import submitit


class Launch:
    """What runs once on each node: torchrun, with the script and its arguments."""

    def __init__(self, arguments, processes):
        self.arguments = arguments
        self.processes = processes

    def __call__(self):
        job = submitit.JobEnvironment()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if job.cluster == "slurm":
            nodes, host = job.num_nodes, job.hostnames[0]
        else:  # each task stands for a node, and gets the next GPUs of this machine
            nodes, host = job.num_tasks, "localhost"
            first = job.local_rank * self.processes
            gpus = map(str, range(first, first + self.processes))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        stopped = []
        signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
        status = subprocess.call(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                f"--nnodes={nodes}",
                f"--nproc_per_node={self.processes}",
                "--rdzv_backend=c10d",
                f"--rdzv_endpoint={host}:{20000 + int(job.job_id) % 10000}",
                f"--rdzv_id={job.job_id}",
                *self.arguments,
            ],
            env=environment,
        )
        if stopped and job.global_rank == 0 and preempted(job.job_id):
            subprocess.call(["scontrol", "requeue", job.job_id])
        if stopped or status == -signal.SIGUSR2:
            signal.pause()  # until Slurm ends this task, too; after time is up, rank 0 requeues
        if status:
            sys.exit(status)

    def checkpoint(self):
        """Tells submitit what to run after a requeue: the same; the snapshot knows the rest."""
        return submitit.helpers.DelayedSubmission(self)


def preempted(job_id):
    """Tells whether Slurm stops the job to make room for another, not since it was cancelled."""
    show = ["scontrol", "show", "job", job_id]
    job = subprocess.run(show, capture_output=True, text=True).stdout
    return "JobState=RUNNING" in job and "PreemptTime=" in job and "PreemptTime=None" not in job


def fail(problem):
    sys.exit(f"submit.py: {problem}")


def at_least_one(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = fail
    parser.add_argument("--nodes", type=at_least_one, default=1)
    parser.add_argument("--gpus_per_node", type=at_least_one, default=1)
    parser.add_argument("--partition")
    parser.add_argument("--nodelist", help="names of nodes, with commas between them")
    parser.add_argument("--timeout_min", type=at_least_one, default=60)
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not Path(args.script).is_file():
        fail(f"there is no {args.script} here")
    if args.cluster == "slurm" and not shutil.which("sbatch"):
        fail("there is no Slurm here (no sbatch): log in to a cluster, or use --cluster local")
    return args


def main():
    args = parse_args()
    executor = submitit.AutoExecutor(folder="logs", cluster=args.cluster)
    executor.update_parameters(
        name=Path(args.script).stem, timeout_min=args.timeout_min, stderr_to_stdout=True
    )
    if args.cluster == "slurm":
        optional = {"slurm_partition": args.partition, "slurm_nodelist": args.nodelist}
        executor.update_parameters(
            nodes=args.nodes,
            tasks_per_node=1,
            gpus_per_node=args.gpus_per_node,
            cpus_per_task=4 * args.gpus_per_node,
            mem_gb=4 * args.gpus_per_node,
            slurm_srun_args=["--kill-on-bad-exit=1"],
            slurm_additional_parameters={"wait-all-nodes": 1},
            **{name: value for name, value in optional.items() if value},
        )
    else:
        executor.update_parameters(tasks_per_node=args.nodes)
    job = executor.submit(Launch([args.script, *args.arguments], args.gpus_per_node))
    log = os.path.relpath(job.paths.stdout)
    cancel = "scancel" if args.cluster == "slurm" else "kill"
    print(f"job     {job.job_id}")
    print(f"logs    {log} (rank 0), {log.replace('_0_log', '_*_log')} (all nodes)")
    print(f"follow  tail -F {log}")
    print(f"cancel  {cancel} {job.job_id}")


if __name__ == "__main__":
    main()
