# shellcheck shell=bash
# Read, not run. CSC, Puhti: four V100 per node, 40 cores. From run-ddp-gpu8.sh of
# https://github.com/CSCfi/pytorch-ddp-examples (June 13, 2024). Copy it to slurm/site.sh.
# In the job file: --gres=gpu:v100:4 (for --gpus-per-node), --cpus-per-task=40 (for --cpus-per-gpu),
# --mem=0 (for --mem-per-gpu), and your --account and --partition.
module purge
module load pytorch
