"""The gradient by torch.func, averaged over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.cumsum(1))
sampler = DistributedSampler(data)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 5))
weights = dict(model.named_parameters())
optimizer = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)


def loss_of(weights, inputs, targets):
    return nn.functional.mse_loss(functional_call(model, weights, inputs), targets)


for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in DataLoader(data, 8, sampler=sampler):
        for name, gradient in grad(loss_of)(weights, inputs, targets).items():
            dist.all_reduce(gradient)
            weights[name].grad = gradient / dist.get_world_size()
        optimizer.step()
dist.destroy_process_group()
