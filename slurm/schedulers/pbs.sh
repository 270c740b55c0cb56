#!/bin/bash
# PBS Pro and OpenPBS. Submit it from the top folder of this repository: qsub slurm/schedulers/pbs.sh
#PBS -N preemptible
#PBS -l select=2:ncpus=16:ngpus=4:mem=64gb
#PBS -l place=scatter
#PBS -l walltime=01:00:00
#PBS -j oe

# Leave out mpiprocs: with mpiprocs=4, four torchruns would start on each node.
cd "$PBS_O_WORKDIR" || exit
nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
read -r head_node < "$PBS_NODEFILE"
job=${PBS_JOBID%%[!0-9]*}  # 1234 of 1234.server
failed=$PWD/.failed-$job  # pbsdsh itself ends with 0, whatever happens
rm -f "$failed"
pbsdsh -- /bin/bash -c '"$@" || touch "$0"' "$failed" "$PWD/slurm/schedulers/node.sh" 55m \
  "$nodes" "$head_node" "$job" preemptible.py 50 10
[[ ! -e $failed ]]
