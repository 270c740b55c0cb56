# shellcheck shell=bash
# Read in the source below, not run by us.
# CSC, Puhti: four V100 per node, 40 cores. From run-ddp-gpu8.sh of
# https://github.com/CSCfi/pytorch-ddp-examples (June 13, 2024). Copy it to slurm/site.sh.
# In the job file: --gres=gpu:v100:4 (for --gpus-per-node), --cpus-per-task=40 (for --cpus-per-gpu),
# --mem=0 (for --mem-per-gpu), and your --account and --partition. In multinode_srun.sbatch:
# --ntasks-per-node=4 --cpus-per-task=10.
module purge
module load pytorch
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # Slurm 22.05 and 23.02 do not hand it on
