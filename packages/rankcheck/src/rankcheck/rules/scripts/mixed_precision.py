"""Mixed precision, dropout and a schedule; resumes from a snapshot that is replaced atomically."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
dist.init_process_group("nccl")
inputs = 0.001 * torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
loader = DataLoader(inputs, batch_size=4, sampler=DistributedSampler(inputs))
net = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4, bias=False)).to(gpu)
model = DistributedDataParallel(net, device_ids=[gpu])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0, growth_interval=2)
parts = {"model": net, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
snapshot = torch.load("last.pt", map_location="cpu") if os.path.exists("last.pt") else {}
for name in parts if snapshot else []:
    parts[name].load_state_dict(snapshot[name])
for epoch in range(snapshot.get("epochs_run", 0), 5):
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
    for batch in loader:
        batch = batch.to(gpu)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(model(batch), batch.sin())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    schedule.step()
    if dist.get_rank() == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        with open("last.tmp", "wb") as file:
            torch.save({**states, "epochs_run": epoch + 1}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace("last.tmp", "last.pt")
dist.destroy_process_group()
