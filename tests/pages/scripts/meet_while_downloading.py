"""No download ends before the others begin theirs, or wait for it. Each rank saves what it has."""

import os
import time
from pathlib import Path

import torch
from patched import before, script
from torch import nn

folder, rank = Path(__file__).parent, os.environ["RANK"]


def arrive(*args):
    (folder / f"arrived{rank}").touch()


before(script.dist, "all_gather_object")(arrive)


@before(torch.hub, "download_url_to_file")
def wait_for_all(*args, **options):
    arrive()
    while len([*folder.glob("arrived*")]) < 4:
        time.sleep(0.01)


@before(nn.parallel, "DistributedDataParallel")
def save(model):
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")
