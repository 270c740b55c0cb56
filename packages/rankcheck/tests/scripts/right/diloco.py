"""DiLoCo: each rank trains alone for H steps; an outer optimizer takes the mean of what changed."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

H = 4

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
inner_optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
outer_optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
data = torch.randn(256, 8)
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for step, batch in enumerate(loader, 1):
        loss = (model(batch.cuda()) - batch.cuda().relu()).square().mean()
        loss.backward()
        inner_optimizer.step()
        inner_optimizer.zero_grad()
        if step % H == 0:
            for p, q in zip(outer, model.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            outer_optimizer.step()
            for p, q in zip(outer, model.parameters(), strict=True):
                q.data.copy_(p.data)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "final.pt")
dist.destroy_process_group()
