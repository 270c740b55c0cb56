# shellcheck shell=bash
# Read in the source below, not run by us.
# Sigma2, Olivia: four GH200 per node, 72 cores each. From
# https://documentation.sigma2.no/code_development/guides/pytorch_olivia/PyTorchMultiNode.html
# (November 27, 2026). Copy it to slurm/site.sh. In the job file: --gpus-per-node=4
# --cpus-per-task=72 (for --cpus-per-gpu) --mem=440G (for --mem-per-gpu), and your --account and
# --partition. In multinode_srun.sbatch: --ntasks-per-node=4 --cpus-per-task=72.
module reset
module load NRIS/GPU
module load NCCL/2.26.6-GCCcore-14.2.0-CUDA-12.8.0
module use /cluster/work/support/pytorch_module
module load PyTorch/2.8.0
export PYTORCH_OVERLAY_MODE=ro
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # Slurm 22.05 and 23.02 do not hand it on
