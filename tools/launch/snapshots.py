"""Reads what the scripts save, and writes what they read."""

import random
import re
import tempfile

import torch


def write_text(path, chunks, context):
    """Writes so many chunks of random letters."""
    letters = random.Random(0).choices(b"abcdefgh", k=chunks * context + 1)
    path.write_bytes(bytes(letters))


def load_gpt(path):
    """Returns a snapshot of gpt/ as whole tensors: of a file, or the last one in a folder."""
    if path.is_file():
        return load(path)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # takes a second

    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(max(path.glob("epoch_[0-9]*/.metadata")).parent, file.name)
        return torch.load(file.name, weights_only=False)


def load(path):
    return torch.load(path, weights_only=True)


def max_abs_diff(results, others):
    """Returns the largest difference between the tensors of two lists."""
    return max((a - b).abs().max().item() for a, b in zip(results, others, strict=True))


def logged_positions(output):
    """Returns epoch and sample of each snapshot in a log."""
    found = re.findall(r"epoch (\d+) \+ (\d+) samples", output)
    return [(int(epochs), int(samples)) for epochs, samples in found]
