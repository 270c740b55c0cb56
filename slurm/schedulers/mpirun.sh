#!/bin/bash
# Open MPI, which reaches the nodes by ssh or, in a job, by the scheduler that it was built for:
#   slurm/schedulers/mpirun.sh node1,node2 preemptible.py 50 10

set -e
hosts=$1
shift
IFS=, read -ra nodes <<< "$hosts"
# Without --bind-to none, each torchrun and all its ranks would share one core.
mpirun --host "$hosts" --map-by ppr:1:node --bind-to none --tag-output \
  "$PWD/slurm/schedulers/node.sh" 0 "${#nodes[@]}" "${nodes[0]}" "$$" "$@"
