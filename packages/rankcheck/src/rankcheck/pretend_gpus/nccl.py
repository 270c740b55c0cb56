"""NCCL, pretended: gloo, which takes tensors on GPUs alone, and one rank per GPU."""

import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

group_of_nccl = None


def refuse_shared_gpu(devices):
    """Raises if another rank of this node has sent from one of these GPUs."""
    rank = str(dist.get_rank())
    node = os.environ.get("GROUP_RANK")
    for device in devices:
        owner = c10d._get_default_store().compare_set(f"{device} of node {node}", "", rank).decode()
        if owner != rank:
            raise RuntimeError(f"Duplicate GPU detected: ranks {owner} and {rank} both on {device}")


def refuse_cpu_tensors(collective):
    def checked(group, *args, **options):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if group == group_of_nccl and any(tensor.device.type == "cpu" for tensor in tensors):
            raise ValueError("No backend type associated with device type cpu")
        return collective(group, *args, **options)

    return checked


def init_process_group(backend=None, device_id=None, **options):
    """Makes a group of gloo's, in the place of NCCL's."""
    global group_of_nccl
    real_init_process_group("gloo", **options)
    # With cpu:gloo,cuda:nccl, or without any name, a tensor on a CPU goes through gloo.
    only_nccl = backend == "nccl" or (backend is None and device_id is not None)
    group_of_nccl = dist.group.WORLD if only_nccl else None


def barrier(group=None):
    options = dist.BarrierOptions()
    options.device = torch.device("cpu")
    (group or dist.group.WORLD).barrier(options).wait()


def send(*args, **options):
    if os.environ.get("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING") != "false":
        print("Warning: An unbatched P2P op (send/recv) was called")
    return real_send(*args, **options)


def object_device(group=None):
    return "cuda" if (group or dist.group.WORLD) == group_of_nccl else real_object_device(group)


real_init_process_group = dist.init_process_group
dist.init_process_group = init_process_group
dist.barrier = barrier
real_send = dist.send
dist.send = send
real_object_device = c10d._get_object_coll_device
c10d._get_object_coll_device = object_device
for name in ("allreduce", "broadcast", "allgather", "_allgather_base", "_reduce_scatter_base"):
    collective = getattr(dist.ProcessGroup, name)
    setattr(dist.ProcessGroup, name, refuse_cpu_tensors(collective))
