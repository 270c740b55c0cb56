#!/bin/bash
# LSF. Submit it from the top folder of this repository: bsub < slurm/schedulers/lsf.sh
#BSUB -J preemptible
#BSUB -n 2
#BSUB -R "span[ptile=1] affinity[core(16)]"
#BSUB -gpu "num=4"
#BSUB -W 1:00
#BSUB -o %J.out
#BSUB -r

# Leave ptile at 1: with ptile=4, four torchruns would start on each node.
read -r head_node < "$LSB_DJOB_HOSTFILE"
blaunch "$PWD/slurm/schedulers/node.sh" 55m "$LSB_DJOB_NUMPROC" "$head_node" "$LSB_JOBID" \
  preemptible.py 50 10
