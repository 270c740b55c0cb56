"""ZeRO: each rank keeps the optimizer's state for its share; rank 0 collects it to save."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
x = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sin())
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)).to(device)
model = nn.parallel.DistributedDataParallel(net, device_ids=[device])
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
checkpoint = torch.load("zero.pt", map_location="cpu") if os.path.exists("zero.pt") else {}
start = checkpoint.pop("epoch", 0)
for name, state in checkpoint.items():
    parts[name].load_state_dict(state)
for epoch in range(start, 4):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    scheduler.step()
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, "epoch": epoch + 1}, "zero.pt.tmp")
        os.replace("zero.pt.tmp", "zero.pt")
    dist.barrier()
dist.destroy_process_group()
