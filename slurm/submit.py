"""Submit any stage that torchrun can start, from Python, with submitit:

    python slurm/submit.py --nodes 2 --gpus_per_node 4 multinode.py 50 10
    python slurm/submit.py --nodes 2 --gpus_per_node 4 --cluster local multinode.py 50 10

The first submits a Slurm job, the second runs it on this machine, with a torchrun for each node. A
Slurm job that is preempted or reaches its time limit is requeued, and resumes from its snapshot:
before that, its torchruns get SIGTERM, which makes preemptible.py and elastic_ddp.py save one.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import submitit


class TorchrunTask:
    """The task of each node: torchrun, with the script and its arguments."""

    def __init__(self, arguments, nproc_per_node):
        self.arguments = arguments
        self.nproc_per_node = nproc_per_node
        self.visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")  # submitit does not pass it on
        self.torchrun = None
        self.received = set()  # the signals

    def __call__(self):
        job = submitit.JobEnvironment()
        # As in slurm/preemptible.sbatch, which explains them.
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "100"
        if job.cluster == "slurm":
            nnodes = job.num_nodes
            head_node = job.hostnames[0]
        else:  # each task stands for a node, and gets the next GPUs of this machine
            nnodes = job.num_tasks
            head_node = "localhost"
            first_gpu = job.local_rank * self.nproc_per_node
            gpus = range(first_gpu, first_gpu + self.nproc_per_node)
            if self.visible_gpus is not None:
                gpus = self.visible_gpus.split(",")[gpus.start : gpus.stop]
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        signal.signal(signal.SIGTERM, self.handle_signal)
        # Slurm sends USR2 before the time limit; without cgroups, it sends it to all processes.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # torchrun and its ranks inherit this
        self.torchrun = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes={nnodes}",
                f"--nproc_per_node={self.nproc_per_node}",
                "--rdzv_backend=c10d",
                f"--rdzv_endpoint={head_node}:{20000 + int(job.job_id) % 10000}",
                f"--rdzv_id={job.job_id}",
                *self.arguments,
            ],
            env=env,
        )
        signal.signal(signal.SIGUSR2, self.handle_signal)
        returncode = self.torchrun.wait()
        if returncode and self.received and job.cluster == "slurm":
            time_limit = signal.SIGUSR2 in self.received
            if job.global_rank == 0:
                if not (time_limit or preempted(job.job_id)):
                    sys.exit(returncode)
                requeue = 'source slurm/requeue.sh && requeue "$@"'  # unless it makes no progress
                if subprocess.call(["bash", "-c", requeue, "bash", *self.arguments]) != 0:
                    sys.exit(returncode)
            signal.pause()  # until Slurm ends this task: if it failed, srun would end the others
        if returncode:
            sys.exit(returncode)

    def handle_signal(self, signum, frame):
        if self.torchrun and not self.received:
            self.torchrun.terminate()  # once, or it would not wait until its ranks have saved
        self.received.add(signum)


def preempted(job_id):
    """Returns whether Slurm stops the job to make room for another, not because it was canceled."""
    command = ["scontrol", "show", "job", job_id]
    job = subprocess.run(command, capture_output=True, text=True).stdout
    return "JobState=RUNNING" in job and "PreemptTime=" in job and "PreemptTime=None" not in job


def positive_int(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=positive_int, default=1)
    parser.add_argument("--gpus_per_node", type=positive_int, default=1)
    parser.add_argument("--partition")
    parser.add_argument("--nodelist", help="names of nodes, separated by commas")
    parser.add_argument("--timeout_min", type=positive_int, default=60)
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no {args.script} here")
    if args.cluster == "slurm" and not shutil.which("sbatch"):
        parser.error(
            "there is no Slurm here (no sbatch): log in to a cluster, or use --cluster local"
        )
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
            mem_gb=16 * args.gpus_per_node,
            slurm_srun_args=["--kill-on-bad-exit=1"],
            slurm_signal_delay_s=120,
            slurm_additional_parameters={"wait-all-nodes": 1, "requeue": True},
            slurm_setup=["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK"],
            **{name: value for name, value in optional.items() if value},
        )
    else:
        executor.update_parameters(tasks_per_node=args.nodes)
    kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or k.startswith("SBATCH_")}
    if args.partition:
        kept.pop("SBATCH_PARTITION", None)  # it would override --partition
    with submitit.helpers.clean_env():  # without the variables of a surrounding salloc
        os.environ.update(kept)
        job = executor.submit(TorchrunTask([args.script, *args.arguments], args.gpus_per_node))
    log = os.path.relpath(job.paths.stdout)
    if args.nodes > 1:  # torchrun sorts the nodes by name: rank 0 need not be the first task's
        log = log.replace("_0_log", f"_{{0..{args.nodes - 1}}}_log")
    cancel = "scancel" if args.cluster == "slurm" else "kill"
    print(f"job     {job.job_id}")
    print(f"logs    {log}")
    print(f"follow  tail -qF {log}")
    print(f"cancel  {cancel} {job.job_id}")


if __name__ == "__main__":
    main()
