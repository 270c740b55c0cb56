"""Tokenised texts: lists of numbers that begin alike; validation in shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
draw = torch.Generator().manual_seed(0)
texts = [[1, *torch.randint(2, 50, (7,), generator=draw).tolist()] for _ in range(96)]
samples = [{"ids": ids, "label": int(sum(ids) % 2)} for ids in texts]


def collate(batch):
    ids = torch.tensor([sample["ids"] for sample in batch])
    return ids, torch.tensor([sample["label"] for sample in batch])


train, val = samples[:64], Subset(samples, range(64 + rank, 96, size))
loader = DataLoader(train, 8, sampler=DistributedSampler(train), collate_fn=collate)
val_loader = DataLoader(val, 8, collate_fn=collate)
torch.manual_seed(0)
model = nn.Sequential(nn.EmbeddingBag(50, 16), nn.Linear(16, 2))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for ids, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(ids), labels).backward()
        optimizer.step()
    right = torch.zeros(2)
    with torch.no_grad():
        for ids, labels in val_loader:
            right += torch.tensor([(model(ids).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: {right[0] / right[1]:.3f} right")
dist.destroy_process_group()
