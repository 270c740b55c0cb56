#!/bin/bash
# Flux. Submit it from the top folder of this repository: flux batch slurm/schedulers/flux.sh
# flux: --nodes=2
# flux: --time-limit=1h
# flux: --job-name=preemptible

nodes=$(flux hostlist --count instance)
head_node=$(flux hostlist --nth=0 instance)
job=$(flux job id "$(flux getattr jobid)")  # as a number
flux run --nodes="$nodes" --tasks-per-node=1 --gpus-per-node=4 --label-io \
  slurm/schedulers/node.sh 55m "$nodes" "$head_node" "$job" preemptible.py 50 10
