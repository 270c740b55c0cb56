"""A data set that cuts and permutes one long text itself, anew each epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

dist.init_process_group("gloo")
text = torch.randint(0, 30, (1040,), generator=torch.Generator().manual_seed(0))


class Windows(Dataset):
    def begin(self, epoch):
        draw = torch.Generator().manual_seed(epoch)
        self.start = int(torch.randint(0, 16, (), generator=draw))
        self.order = torch.randperm(64, generator=draw)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        begin = self.start + 16 * int(self.order[index])
        return text[begin : begin + 16]


windows = Windows()
windows.begin(0)
loader = DataLoader(windows, 8, sampler=DistributedSampler(windows, shuffle=True))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)))
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(3):
    windows.begin(epoch)
    for batch in loader:
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
