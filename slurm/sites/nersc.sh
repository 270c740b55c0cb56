# shellcheck shell=bash
# Read in the source below, not run by us.
# NERSC, Perlmutter: four A100 per node, one CPU with 64 cores. From submit_pm_dp.sh of
# https://github.com/NERSC/sc24-dl-tutorial (February 5, 2025), which runs a container of Shifter's.
# Copy it to slurm/site.sh. In the job file: --constraint=gpu --qos=regular --gpus-per-node=4
# --cpus-per-gpu=32 --image=nersc/pytorch:24.08.01 --module=gpu,nccl-plugin, and your --account.
export FI_MR_CACHE_MONITOR=userfaultfd

srun() {  # the job files' srun then starts torchrun in the container
  local options=()
  while [[ $1 == -* ]]; do options+=("$1") && shift; done
  command srun "${options[@]}" shifter "$@"
}
