"""Two towers, a contrastive loss over the batches of all ranks, gathered with gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Linear(5, 6)

    def forward(self, image, text):
        return F.normalize(self.image(image)), F.normalize(self.text(text))


dist.init_process_group()
images = torch.randn(128, 12, generator=torch.Generator().manual_seed(3))
data = TensorDataset(images, images[:, :5] + 0.1)
loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=3), drop_last=True)
model = nn.parallel.DistributedDataParallel(TwoTowers())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for batch in tqdm(loader, disable=dist.get_rank() > 0):
        optimizer.zero_grad()
        image, text = model(*batch)
        # The rows of this rank's images, against the texts of all ranks.
        logits = image @ torch.cat(all_gather(text)).T / 0.2
        loss = F.cross_entropy(logits, torch.arange(len(image)) + dist.get_rank() * len(image))
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
