"""Lets a script that is written for GPUs run on CPUs: where it says "cuda", it gets the CPU.

Packages, torch among them, are told the truth. `tensor.py` is stricter, and for the
scripts of this series: half of others' stop there, such as in `device_ids` of DDP, or an LSTM.
"""

import atexit
import functools
import inspect
import os
import sys
import time
import weakref

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from rankcheck.pretend_gpus import cuda as pretend_cuda
from rankcheck.witness import is_library

QUESTIONS = ("current_accelerator", "device_count", "is_available", "is_bf16_supported")
LIBRARIES = ("accelerate", "lightning", "lightning_fabric")  # which call set_device
used = set()  # the GPUs that the script has put something on; None, if it hides the others
on_first_use = []  # functions of such a GPU's number
moved = weakref.WeakValueDictionary()  # what a real GPU would hold, by id


def visible():
    """Returns how many GPUs the script sees: all, unless it has named some itself."""
    named = os.environ["CUDA_VISIBLE_DEVICES"]  # set to hide real ones: to nothing
    numbers = [name for name in named.split(",") if name.isdigit()]
    return len(numbers) if named else int(os.environ["PRETEND_GPUS"])


def has_library():
    """Whether a library chooses the rank's GPU: here, it takes the CPU."""
    return any(name in sys.modules for name in LIBRARIES)


def current():
    return int(os.environ.get("LOCAL_RANK", 0)) if has_library() else pretend_cuda.current


def is_on_gpu(tensor):
    """Whether a real GPU would hold it; of what has a gradient, functions may hide the origin."""
    return moved.get(id(tensor)) is tensor or tensor.requires_grad


def put_on_gpu(tensors):
    moved.update((id(tensor), tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))


def tensors_of(values):
    """Returns the tensors among arguments or results, and in lists among them."""
    lists = [value if isinstance(value, list | tuple) else [value] for value in values]
    return [v for values in lists for v in values if isinstance(v, torch.Tensor)]


def on_cpu(device):
    """Returns the CPU for a GPU, and notes its number, unless the script hides the others."""
    if type(device) is int:
        device = f"cuda:{device}"
    name = str(device) if isinstance(device, str | torch.device) else ""
    if name.partition(":")[0] != "cuda":
        return device
    number = pretend_cuda.checked(int(name[5:] or current()))
    number = None if os.environ["CUDA_VISIBLE_DEVICES"] else number
    if number not in used:
        used.add(number)
        for function in on_first_use:
            function(number)
    return "cpu"


class Translate(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        asked = [kwargs.get("device")]
        if func == torch.device:
            number = args and type(args[0]) is int
            return func("cuda", *args) if number else func(*args, **kwargs)
        if func == torch.Tensor.pin_memory:
            return args[0]
        if func == torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], *(args[1:2] or ["cuda"]))
        if func == torch.Tensor.to and len(args) > 1:
            asked.append(args[1])
            args = (args[0], on_cpu(args[1]), *args[2:])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        result = func(*args, **kwargs)
        if any(map(names_gpu, asked)) or any(map(is_on_gpu, tensors_of(args))):
            put_on_gpu(tensors_of([result]))
        return result


def names_gpu(device):
    return type(device) is int or str(device).startswith("cuda")


def module_to(module, *args, **options):
    if any(map(names_gpu, [*args[:1], options.get("device")])):
        put_on_gpu([*module.parameters(), *module.buffers()])
    if args:
        args = (on_cpu(args[0]), *args[1:])
    if "device" in options:
        options["device"] = on_cpu(options["device"])
    return original_to(module, *args, **options)


original_to = torch.nn.Module.to


def bind(device):
    """A process group gets no GPU; like NCCL's, it chooses the current one."""
    if device is not None:
        pretend_cuda.set_device(device)


def no_ids(device_ids):
    """DDP gets no GPUs; that there are such is checked."""
    for device in device_ids or ():
        pretend_cuda.checked(device if isinstance(device, int) else torch.device(device).index or 0)


def on_cpu_mesh(device_type):
    """Returns the CPU for a mesh of GPUs, which gives each rank its own."""
    if device_type == "cuda":
        pretend_cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return on_cpu(device_type)


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


def change(owner, name, **changes):
    """Changes the arguments of these names, wherever `owner.name` gets them."""
    call = getattr(owner, name)
    signature = inspect.signature(call)

    @functools.wraps(call)
    def wrapper(*args, **options):
        bound = signature.bind(*args, **options)
        for argument, new in changes.items():
            old = bound.arguments.get(argument, signature.parameters[argument].default)
            bound.arguments[argument] = new(old)
        return call(*bound.args, **bound.kwargs)

    setattr(owner, name, wrapper)


def tell_script(owner, name, answer):
    """Lets a function give the script this answer, and packages the true one."""
    truth = getattr(owner, name, answer)

    def told(*args, **options):
        asked = truth if is_library(sys._getframe(1)) else answer
        return asked(*args, **options)

    setattr(owner, name, told if name in QUESTIONS else answer)


def install():
    pretend_cuda.visible = visible
    answers = pretend_cuda.ANSWERS | {"device_count": visible}
    for name, answer in answers.items():
        tell_script(torch.cuda, name, answer)
    for name in ("device_count", "is_available", "synchronize"):
        tell_script(torch.accelerator, name, answers[name])
    for name in ("current_device", "set_device"):
        tell_script(torch.accelerator, f"{name}_index", answers[name])
    gpu = torch.device("cuda")
    tell_script(torch.accelerator, "current_accelerator", lambda check_available=False: gpu)
    torch.nn.Module.to = module_to
    torch.nn.Module.cuda = lambda module, device="cuda": module_to(module, device)
    torch.Generator = Generator
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module, process_group=None: module
    none = {"device_ids": no_ids, "output_device": lambda device: None}
    change(torch.nn.parallel.DistributedDataParallel, "__init__", **none)
    change(torch.amp.GradScaler, "__init__", device=on_cpu)
    change(torch.autocast, "__init__", device_type=on_cpu)
    change(torch.distributed.DeviceMesh, "__init__", device_type=on_cpu_mesh)
    change(torch, "load", map_location=lambda device: "cpu")
    change(dist, "init_process_group", backend=lambda name: "gloo", device_id=bind)
    change(dist, "new_group", backend=lambda name: None)
    change(dist, "barrier", device_ids=lambda ids: None)
    Translate().__enter__()
    atexit.register(time.sleep, 0.1)  # else gloo may abort where NCCL ends (pytorch#190489)
