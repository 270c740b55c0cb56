"""A contrastive model whose forward updates an average of its weights, as MoCo's does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.average = nn.Linear(8, 4), nn.Linear(8, 4)
        self.average.load_state_dict(self.base.state_dict())
        self.average.requires_grad_(False)

    @torch.no_grad()
    def keys_of_all(self, samples):
        for new, old in zip(self.base.parameters(), self.average.parameters(), strict=True):
            old.lerp_(new, 0.5)
        keys = normalize(self.average(samples + 0.1))
        gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys)
        return torch.cat(gathered)

    def forward(self, samples):
        scores = 5 * normalize(self.base(samples)) @ self.keys_of_all(samples).T
        return cross_entropy(scores, torch.arange(len(samples)) + dist.get_rank() * len(samples))


dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(64, 8)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = DistributedDataParallel(Moco())
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for samples in loader:
        optimizer.zero_grad()
        model(samples).backward()
        optimizer.step()
dist.destroy_process_group()
