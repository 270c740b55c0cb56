"""Two optimizers, of which the second begins after some steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.square())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
model = nn.parallel.DistributedDataParallel(net)
matrices = torch.optim.SGD([p for p in net.parameters() if p.ndim == 2], lr=0.1)
biases = torch.optim.Adam([p for p in net.parameters() if p.ndim == 1], lr=1e-3)
step = 0
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        step += 1
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        matrices.step()
        if step > 5:
            biases.step()
dist.destroy_process_group()
