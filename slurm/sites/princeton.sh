# shellcheck shell=bash
# Read in the source below, not run by us.
# Princeton, Della: two or more GPUs per node. From 02_pytorch_ddp/job.slurm of
# https://github.com/PrincetonUniversity/multi_gpu_training (March 6, 2025).
# Copy it to slurm/site.sh.
# In the job file: --gpus-per-node=2 --cpus-per-gpu=8 --mem-per-gpu=16G; no partition is named.
module purge
module load anaconda3/2023.9
conda activate torch-env  # your environment with torch and tqdm
