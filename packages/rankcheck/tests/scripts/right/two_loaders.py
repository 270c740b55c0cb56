"""Two tasks with a DataLoader each, in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
loaders = []
for task in range(2):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(task))
    data = TensorDataset(x, x.roll(task + 1, dims=1))
    loaders.append(DataLoader(data, 8, sampler=DistributedSampler(data, seed=task)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(4, 16), nn.ModuleList([nn.Linear(16, 4) for _ in loaders])

    def forward(self, inputs, task):
        return self.heads[task](self.body(inputs).relu())


model = nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for loader in loaders:
        loader.sampler.set_epoch(epoch)
    for batches in zip(*loaders, strict=True):
        for task, (inputs, targets) in enumerate(batches):
            loss = nn.functional.mse_loss(model(inputs, task), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
dist.destroy_process_group()
