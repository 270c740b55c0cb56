# shellcheck shell=bash
# Read in the source below, not run by us.
# LUMI-G: eight GPUs per node (four MI250X of two), 56 of its cores, through a container.
# From 05-multi-gpu-and-node/run_ddp_torchrun_4.sh of
# https://github.com/Lumi-supercomputer/LUMI-AI-Guide (May 19, 2026). Copy it to slurm/site.sh.
# In the job file: --gpus-per-node=8 --cpus-per-gpu=7 --mem-per-gpu=60G, and your --account and
# --partition.
module purge
module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings
MIOPEN_DIR=$(mktemp -d)  # AMD's compiled kernels; not in the home folder
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_DIR/cache MIOPEN_USER_DB=$MIOPEN_DIR/config
image=/appl/local/laifs/containers/YOUR_CHOICE.sif  # the guide names a current one

srun() {  # the job files' srun then starts torchrun in the container
  local options=()
  while [[ $1 == -* ]]; do options+=("$1") && shift; done
  command srun "${options[@]}" singularity exec "$image" "$@"
}
