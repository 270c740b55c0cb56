"""Saves at SIGTERM, after a step that all ranks agree on, and resumes there; a data worker."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def request_stop(signum, frame):
    stop.fill_(1)


def start_own_session(worker_id):
    os.setsid()  # torchrun signals the process group of each rank


def save(steps_run):
    if dist.get_rank() == 0:
        snapshot = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        with open("last.tmp", "wb") as file:
            torch.save({**snapshot, "steps_run": steps_run}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace("last.tmp", "last.pt")


torch.multiprocessing.set_start_method("fork")  # the default of Python 3.14 runs this file again
dist.init_process_group("gloo")
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
sampler = DistributedSampler(data)
loader = DataLoader(data, 4, sampler=sampler, num_workers=1, worker_init_fn=start_own_session)
net = nn.Linear(4, 4)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
steps_run = 0
if os.path.exists("last.pt"):
    snapshot = torch.load("last.pt")
    net.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    steps_run = snapshot["steps_run"]
model = DistributedDataParallel(net)
stop = torch.zeros(())  # 1 on a rank that has received the signal
signal.signal(signal.SIGTERM, request_stop)
for epoch in range(steps_run // len(loader), 3):
    sampler.set_epoch(epoch)
    for step, batch in enumerate(loader, epoch * len(loader)):
        if step < steps_run:
            continue  # the snapshot has it
        loss = nn.functional.mse_loss(model(batch), batch.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:  # not in every step, because here the ranks wait for each other
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop:
                save(step + 1)
                dist.barrier()
                dist.destroy_process_group()
                sys.exit("stopped by a signal")
    save((epoch + 1) * len(loader))
dist.destroy_process_group()
