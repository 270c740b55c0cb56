"""What torch.cuda answers where GPUs are pretended."""

import itertools
import os
import time
from collections import defaultdict
from types import SimpleNamespace

import torch

current = 0


def visible():
    """Returns how many of the PRETEND_GPUS GPUs CUDA_VISIBLE_DEVICES shows, as CUDA counts them."""
    numbers = [str(number) for number in range(int(os.environ["PRETEND_GPUS"]))]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers)).split(",")
    return len(list(itertools.takewhile(numbers.__contains__, named)))


def checked(gpu):
    if gpu >= visible():
        raise RuntimeError("CUDA error: invalid device ordinal")
    return gpu


def set_device(device):
    global current
    current = checked(device if isinstance(device, int) else torch.device(device).index)


def pin(*memory):
    return 0  # success


class Event(torch.cpu.Event):
    def __init__(self, **options):
        self.record()

    def record(self, stream=None):
        self.time = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.time - self.time)


class Stream(torch.cpu.Stream):
    def synchronize(self):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


PROPERTIES = SimpleNamespace(
    name="pretended", major=8, minor=0, total_memory=2**34, multi_processor_count=64
)
ANSWERS = {
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": lambda: None,
    "cudart": lambda: SimpleNamespace(cudaHostRegister=pin, cudaHostUnregister=pin),
    "current_device": lambda: current,
    "current_stream": lambda *device, **options: Stream(),
    "default_generators": [torch.default_generator] * int(os.environ["PRETEND_GPUS"]),
    "device_count": visible,
    "get_device_capability": lambda *device, **options: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda *device, **options: PROPERTIES.name,
    "get_device_properties": lambda *device, **options: PROPERTIES,
    "get_rng_state": lambda *device, **options: torch.get_rng_state(),
    "is_available": lambda: visible() > 0,
    "is_bf16_supported": lambda including_emulation=True: True,
    "max_memory_allocated": lambda *device, **options: 2**20,
    "mem_get_info": lambda *device, **options: (2**33, PROPERTIES.total_memory),
    "memory_stats": lambda *device, **options: defaultdict(int),
    "reset_peak_memory_stats": lambda *device, **options: None,
    "set_device": set_device,
    "set_rng_state": lambda *state, **options: None,
    "stream": torch.cpu.stream,
    "synchronize": lambda *device, **options: None,
}
torch.cuda.nccl.version = lambda: (2, 27, 7)


def install():
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = visible
    torch.accelerator.synchronize = ANSWERS["synchronize"]
    torch.accelerator.set_device_index = lambda device: torch.cuda.set_device(device)
