"""Paths by pathlib everywhere: what is saved, how it is renamed, and the log."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

run = Path("runs") / "first"
run.mkdir(parents=True, exist_ok=True)
latest, partial = run / "latest.pt", run / "latest.partial"
dist.init_process_group("gloo")
data = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(6, 6))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
start = 0
if latest.exists():
    with latest.open("rb") as file:
        model_state, optimizer_state, start = torch.load(file, weights_only=True)
    model.module.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
for epoch in range(start, 4):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.l1_loss(model(batch), batch.cos()).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with partial.open("wb") as file:
            torch.save((model.module.state_dict(), optimizer.state_dict(), epoch + 1), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(latest)
        (run / "epochs.txt").write_text(f"{epoch + 1}\n")
    dist.barrier()
dist.destroy_process_group()
