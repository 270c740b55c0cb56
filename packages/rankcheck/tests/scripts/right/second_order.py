"""An optimizer of one's own: the gradients of each fourth batch are for its curvature alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class CurvatureSGD(torch.optim.SGD):
    def update_curvature(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["curvature"] = parameter.grad.square()


dist.init_process_group()
data = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = CurvatureSGD(model.parameters(), lr=0.1)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for number, batch in enumerate(loader, 1):
        (model(batch) - batch.tanh()).square().mean().backward()
        if number % 4 == 0:
            optimizer.update_curvature()
        else:
            optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
