#!/bin/bash
# Grid Engine. Submit it from the top folder of this repository: qsub slurm/schedulers/sge.sh
# Your site names the GPUs and the parallel environment (one slot per node, with control_slaves).
#$ -S /bin/bash
#$ -N preemptible
#$ -pe mpi 2
#$ -l gpu=4
#$ -l h_rt=01:00:00
#$ -cwd
#$ -j y
#$ -r y

pids=()
read -r head_node _ < "$PE_HOSTFILE"
while read -r node _; do
  qrsh -inherit "$node" "$PWD/slurm/schedulers/node.sh" 55m "$NHOSTS" "$head_node" "$JOB_ID" \
    preemptible.py 50 10 < /dev/null &
  pids+=($!)
done < "$PE_HOSTFILE"
status=0
for pid in "${pids[@]}"; do
  wait "$pid" || status=$?
done
exit "$status"
