"""On PYTHONPATH, makes torch count FAKE_GPUS GPUs and, with FAKE_CUDA set, believe in them."""

import os
import time

import torch

torch.cuda.device_count = lambda: int(os.environ["FAKE_GPUS"])
if "FAKE_CUDA" in os.environ:
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: time.sleep(60)  # until torchrun ends this rank
