"""A folder for each snapshot; the newest one that is marked as whole is resumed."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = torch.randn(16 * 8 * size, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
whole = [int(path.parent.name[4:]) for path in Path().glob("step*/whole")]
first = max(whole, default=0)
if first:
    states = torch.load(f"step{first}/model.pt")
    net.load_state_dict(states["net"])
    optimizer.load_state_dict(states["optimizer"])
model = DistributedDataParallel(net)
for step, batch in enumerate(data.view(16, size, 8, 4)[first:, rank], first + 1):
    loss = nn.functional.mse_loss(model(batch), batch.sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0 and rank == 0:
        states = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        os.makedirs(f"step{step}", exist_ok=True)
        torch.save(states, f"step{step}/model.pt")
        Path(f"step{step}/whole").touch()
dist.destroy_process_group()
