#!/bin/bash
# Starts torchrun on one node; srun runs it on each node of a step, for interactive use:
#   srun --nodes=2 --gres=gpu:2 --cpus-per-gpu=4 ./slurm/torchrun_script.sh [SCRIPT ARGUMENTS]

set -eo pipefail
if [ -z "$SLURM_STEP_NODELIST" ] || [ -z "$SLURM_GPUS_ON_NODE" ]; then
  [ "${SLURM_PROCID:-0}" != 0 ] || echo "torchrun_script.sh: start it on nodes with GPUs:" \
    "srun --nodes=2 --gres=gpu:2 --cpus-per-gpu=4 $0 [SCRIPT ARGUMENTS]" >&2
  exit 1
fi
if [ "$SLURM_STEP_NUM_TASKS" != "$SLURM_STEP_NUM_NODES" ]; then
  [ "$SLURM_PROCID" != 0 ] || echo "torchrun_script.sh: use --ntasks-per-node=1" >&2
  exit 1
fi
[ $# -gt 0 ] || set -- elastic_ddp.py

export OMP_NUM_THREADS=1  # the value that torchrun would set, with a warning
export TORCH_CPP_LOG_LEVEL=ERROR  # hides harmless stack traces at the end (pytorch#118891)
read -r head_node < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
exec torchrun \
  --nnodes="$SLURM_STEP_NUM_NODES" --nproc_per_node="$SLURM_GPUS_ON_NODE" \
  --rdzv_backend=c10d --rdzv_endpoint="$head_node:$((20000 + (10 * SLURM_JOB_ID + SLURM_STEP_ID) % 10000))" \
  --rdzv_id="$SLURM_JOB_ID.$SLURM_STEP_ID" "$@"
