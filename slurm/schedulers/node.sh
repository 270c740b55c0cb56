#!/bin/bash -l
# Starts torchrun on one node, in a login shell, which knows the command module; the job files of
# this folder run it on each of theirs:
#   slurm/schedulers/node.sh TIME NODES HEAD_NODE JOB SCRIPT [ARGUMENTS]
# After TIME, such as 55m (0: never), torchrun gets SIGTERM, so that preemptible.py saves and stops.
# The exit status is 0 only if the training is complete.

set -e
time=$1 nodes=$2 head_node=$3 job=$4
shift 4
cd "$(dirname "$0")/../.."
source .venv/bin/activate  # or what your cluster uses, such as: module load pytorch

export OMP_NUM_THREADS=1  # the value that torchrun would set, with a warning
export TORCH_CPP_LOG_LEVEL=ERROR TORCH_LOGS=-torch.distributed.elastic.rendezvous  # less noise
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds to save in, after a signal
timeout --foreground "$time" torchrun --nnodes="$nodes" --nproc_per_node=gpu --rdzv_id="$job" \
  --rdzv_backend=c10d --rdzv_endpoint="$head_node:$((20000 + job % 10000))" "$@"
