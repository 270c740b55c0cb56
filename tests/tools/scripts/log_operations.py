"""Writes down the operations of torch.distributed, as torch's profiler sees them."""

import atexit
import json
import os

import torch.autograd.profiler

profiler = torch.autograd.profiler.profile().__enter__()


@atexit.register
def write_log():
    profiler.__exit__(None, None, None)
    events = sorted(profiler.function_events, key=lambda event: event.time_range.start)
    names = [event.name.split("::")[1] for event in events if event.name.startswith("c10d::")]
    with open(os.environ.get("RANK", "0") + ".log.json", "w") as file:
        json.dump(names, file)
