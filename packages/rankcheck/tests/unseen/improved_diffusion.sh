# https://github.com/openai/improved-diffusion at 1bc7bbbdc4
# OPENAI_LOGDIR=log rankcheck --empty --launcher torchrun --resume='--resume_checkpoint log/model000005.pt' /CLONE/scripts/image_train.py --data_dir . --image_size 32 --num_channels 32 --num_res_blocks 1 --attention_resolutions 8 --diffusion_steps 20 --batch_size 8 --microbatch 4 --log_interval 2 --save_interval 5 --lr_anneal_steps 20
# torchrun takes the place of mpiexec, and a stand-in that of mpi4py, with a group of its own
cd /CLONE
ed -s scripts/image_train.py <<'END'
5c
import argparse, os, sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
.
w
END
ed -s improved_diffusion/dist_util.py <<'END'
41c
    dist.init_process_group(backend=backend, init_method="env://")
    comm.group = dist.new_group(backend="gloo")
.
39c
    port = os.environ["MASTER_PORT"]
.
34c
        hostname = os.environ["MASTER_ADDR"]
.
w
END
ed -s improved_diffusion/logger.py <<'END'
406c
    for varname in ["RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"]:
.
w
END
ed -s improved_diffusion/image_datasets.py <<'END'
80,82c
        pil_image = Image.fromarray(np.random.RandomState(path).randint(0, 255, (32, 32, 3)).astype(np.uint8))
.
29c
    all_files = list(range(64))
.
w
END
ed -s improved_diffusion/script_util.py <<'END'
104c
        channel_mult = (1, 1)
.
w
END
cat > mpi4py.py <<'END'
"""Stands in for mpi4py, of which improved-diffusion asks for ranks and for bcast."""

import os

import torch.distributed as dist


class Comm:
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    group = None

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def bcast(self, value, root=0):
        if self.group is None:  # before the process group, each rank has found out by itself
            return value
        values = [value]
        dist.broadcast_object_list(values, root, group=self.group)
        return values[0]


class MPI:
    COMM_WORLD = Comm()
END
cat > blobfile.py <<'END'
"""Stands in for blobfile: files on a disk."""

from os import listdir
from os.path import basename, dirname, exists, isdir, join

BlobFile = open
END
