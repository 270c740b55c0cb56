# shellcheck shell=bash disable=SC2034  # the job files use its variables
# Every job file sources this. Copy it along with a job file.

# srun would inherit these from salloc or srun around sbatch, or from sbatch --export=NONE:
unset SLURM_EXPORT_ENV SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
unset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
[[ ! $SLURM_CPUS_PER_GPU ]] || unset SLURM_CPUS_PER_TASK  # srun refuses both
export SLURM_CPU_BIND=none  # else some clusters bind each task, with all it starts, to one CPU
if [[ $SLURM_ARRAY_JOB_ID ]]; then  # perhaps that of an array task that has submitted this job
  until record=$(scontrol show job "$SLURM_JOB_ID"); do sleep 5; done  # Slurm may be busy
  [[ $record == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
fi

if [[ ! $SLURM_GPUS_ON_NODE ]] && ((SLURM_RESTART_COUNT > 0)); then
  echo "this time, Slurm has started the job without its GPUs" >&2  # docs/elastic_job.md says why
  source slurm/requeue.sh
  requeue "$@" && exit
  exit 1
fi
: "${SLURM_GPUS_ON_NODE:?ask for GPUs, as with --gpus-per-node=4}"

export OMP_NUM_THREADS=1  # the value that torchrun would set, with a warning
export TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-torch.distributed.elastic.rendezvous  # less noise
# If NCCL hangs, turn on its log, or set the network interface:
# export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# If torchrun does not reach its own node under its name, set:
# export PET_RDZV_CONF=is_host=1
read -r head_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))  # on that node, for the rendezvous

# Write the commands that your cluster needs, such as module load pytorch, into slurm/site.sh
if [[ -e slurm/site.sh ]]; then
  source slurm/site.sh
elif [[ -e .venv ]]; then
  source .venv/bin/activate
else
  echo "there is no .venv: write slurm/site.sh" >&2
  exit 1
fi
