"""Batches of texts of one length, dealt out to the ranks, in an order of each epoch."""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
draw = random.Random(0)
texts = [torch.tensor([draw.randrange(20) for _ in range(draw.randint(3, 9))]) for _ in range(128)]


class ByLength:
    epoch = 0

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(128), 128)
        order.sort(key=lambda index: len(texts[index]))
        batches = [order[begin : begin + 8] for begin in range(0, 128, 8)]
        random.Random(self.epoch).shuffle(batches)
        return iter(batches[rank::size])

    def __len__(self):
        return 16 // size


def pad(batch):
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=20)


batches = ByLength()
loader = DataLoader(texts, batch_sampler=batches, collate_fn=pad)
model = nn.Sequential(nn.Embedding(21, 8), nn.Linear(8, 21))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    batches.epoch = epoch
    for batch in loader:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=20)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
