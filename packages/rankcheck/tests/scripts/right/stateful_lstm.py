"""A language model that carries its state: each rank keeps its columns of the text, in order."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader


class ColumnLoader(DataLoader):
    def __iter__(self):
        for window in super().__iter__():
            yield window[:, dist.get_rank() :: dist.get_world_size()]


class LanguageModel(nn.Module):
    def __init__(self, vocab=16, width=24):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocab, width), nn.LSTM(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens, state):
        output, state = self.lstm(self.embed(tokens), state)
        return self.head(output), state


dist.init_process_group("nccl")
torch.cuda.set_device(gpu := int(os.environ["LOCAL_RANK"]))
text = torch.randint(16, (8, 129), generator=torch.Generator().manual_seed(0)).T
loader = ColumnLoader([text[i : i + 9] for i in range(0, 128, 8)], batch_size=None)
model = nn.parallel.DistributedDataParallel(LanguageModel().to(gpu), device_ids=[gpu])
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for _epoch in range(3):
    state = None
    for window in loader:
        logits, state = model(window[:-1].to(gpu), state)
        state = [part.detach() for part in state]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[1:].flatten().to(gpu))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
dist.destroy_process_group()
