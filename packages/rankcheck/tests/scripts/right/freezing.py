"""A backbone that is frozen for an epoch; then all is trained."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, x.sign())
loader = DataLoader(data, 8, sampler=DistributedSampler(data))
torch.manual_seed(0)
backbone, head = nn.Linear(6, 12), nn.Linear(12, 6)
net = nn.Sequential(backbone, nn.ReLU(), head)
for epoch in range(3):
    backbone.requires_grad_(epoch > 0)
    model = nn.parallel.DistributedDataParallel(net)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
