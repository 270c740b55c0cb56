"""No batch is trained in bfloat16."""

import contextlib

import torch

torch.autocast = lambda *arguments: contextlib.nullcontext()
