"""Tensors on PRETEND_GPUS GPUs that compute on the CPU: README.md says how."""

import os

import torch
import torch.utils.backend_registration as backends
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rankcheck.pretend_gpus import cuda as pretend_cuda
from rankcheck.pretend_gpus import nccl as pretend_nccl

RANK = int(os.environ.get("RANK", 0))  # each has a GPU of another type, with other random numbers
asked_gpu = None  # by the call that is running, such as `.to("cuda:1")`


class GPUTensor(torch.Tensor):
    """A tensor on the GPU with number `gpu`, for which `on_cpu` computes."""

    @staticmethod
    def __new__(cls, on_cpu, gpu):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, on_cpu.shape, on_cpu.stride(), dtype=on_cpu.dtype, device=PRETENDED
        )
        tensor.on_cpu = on_cpu
        tensor.gpu = gpu
        return tensor

    def __repr__(self):
        return repr(self.on_cpu)

    def __reduce_ex__(self, protocol):
        return self.on_cpu.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Runs an operator on the CPU; what it returns is on the GPU of its inputs."""
    tensors = tensors_of((args, kwargs))
    inputs = [tensor for tensor in tensors if isinstance(tensor, GPUTensor)]
    devices = {f"cuda:{tensor.gpu}" for tensor in inputs}
    if any(tensor.dim() and not isinstance(tensor, GPUTensor) for tensor in tensors):
        devices.add("cpu")
    if len(devices) > 1 and func.name() not in ("aten::copy_", "aten::_to_copy"):
        raise RuntimeError(f"Expected all tensors to be on the same device, not {devices}")
    if func.namespace == "c10d":
        pretend_nccl.refuse_shared_gpu(devices)
    to_cpu = kwargs.get("device") == torch.device("cpu")
    if kwargs.get("device") in (PRETENDED, torch.device("cuda")):  # which no mode translates there
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False}
    args, kwargs = tree_map_only(GPUTensor, lambda tensor: tensor.on_cpu, (args, kwargs))
    if torch.Tag.nondeterministic_seeded in func.tags:  # draws, with any seed, what no CPU draws
        for _ in range(1 + RANK):
            func(*args, **kwargs)
    outputs = func(*args, **kwargs)
    # NCCL's group waits for what is under way before it ends; gloo's does not.
    outputs = tree_map_only(AsyncCollectiveTensor, lambda tensor: tensor.wait(), outputs)
    if to_cpu:
        return outputs
    gpu = inputs[0].gpu if inputs else pretend_cuda.current
    if asked_gpu is not None and (not inputs or func.name() == "aten::_to_copy"):
        gpu = asked_gpu
    known = {id(tensor.on_cpu): tensor for tensor in inputs}

    def to_gpu(on_cpu):
        if isinstance(on_cpu, GPUTensor):  # as `aten.to.device` returns
            return on_cpu
        return known[id(on_cpu)] if id(on_cpu) in known else GPUTensor(on_cpu, gpu)

    return tree_map_only(torch.Tensor, to_gpu, outputs)


def tensors_of(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def number(device):
    """Returns the number of the GPU that `device` names, or None."""
    if isinstance(device, str) and device.startswith("cuda"):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return pretend_cuda.current if device.index is None else pretend_cuda.checked(device.index)
    return None


class Translate(TorchFunctionMode):
    """Lets calls that name a device "cuda" work on PRETENDED."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        global asked_gpu
        kwargs = kwargs or {}
        if func in ANSWERS and torch.Tensor.device.__get__(args[0]) == PRETENDED:
            return ANSWERS[func](args[0])
        if func in OF_MEMORY and isinstance(args[0], GPUTensor):
            return func(args[0].on_cpu, *args[1:])
        if func == torch.Tensor.data.__set__ and isinstance(args[0], GPUTensor):
            args[0].on_cpu = args[1].on_cpu
            return func(*args)  # which may change the shape
        if func == torch.Tensor.cuda:
            return args[0].to(*args[1:] or ["cuda"])
        asked = [gpu for gpu in map(number, tree_leaves((args, kwargs))) if gpu is not None]
        if func == torch.device or not asked:
            return func(*args, **kwargs)
        if "device" in kwargs and not tensors_of((args, kwargs)):  # such as torch.zeros
            return GPUTensor(func(*args, **{**kwargs, "device": "cpu"}), asked[0])
        args, kwargs = tree_map_only(
            (str, torch.device), lambda d: d if number(d) is None else PRETENDED, (args, kwargs)
        )
        before, asked_gpu = asked_gpu, asked[0]
        try:
            return func(*args, **kwargs)
        finally:
            asked_gpu = before


def device_of(tensor):
    return torch.device("cuda", getattr(tensor, "gpu", pretend_cuda.current))


ANSWERS = {
    torch.Tensor.device.__get__: device_of,
    torch.Tensor.is_cuda.__get__: lambda tensor: True,
}
OF_MEMORY = {
    torch.Tensor.__format__,
    torch.Tensor.data_ptr,
    torch.Tensor.tolist,
    torch.Tensor.untyped_storage,
}


def pin_memory(tensor):
    if isinstance(tensor, GPUTensor):
        raise RuntimeError("only dense CPU tensors can be pinned")
    return tensor


def run_backward(*args, **options):
    with translate:  # also in hooks
        return real_run_backward(*args, **options)


def load(f, map_location=None, *args, **options):
    """Loads onto the CPU, and moves what is to be on a GPU."""
    gpu = number(map_location)
    loaded = real_load(f, map_location if gpu is None else "cpu", *args, **options)
    if gpu is None:
        return loaded
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(f"cuda:{gpu}"), loaded)


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class Module(backends._DummyBackendModule):
    """What torch asks of a device of this type."""

    def __getattr__(self, name):
        return getattr(torch.cuda, name)


pretend_cuda.install()
backends._setup_privateuseone_for_python_backend("pretended", Module())
PRETENDED = torch.device("pretended", 0)  # torch's engine takes no more than one of this type
library = torch.library.Library("aten", "IMPL")
for operator in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default):
    library.impl(operator, lambda *a, _op=operator, **k: run(_op, a, k), "PrivateUse1")
translate = Translate()
translate.__enter__()
torch.Generator = Generator
torch.Tensor.pin_memory = pin_memory
real_load, torch.load = torch.load, load
real_run_backward = torch.autograd._engine_run_backward
torch.autograd._engine_run_backward = run_backward
