"""Evolution strategies: each rank tries a perturbation, and sets p.grad itself."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(64, 4)
model = nn.Linear(4, 1)
weights = list(model.parameters())
optimizer = torch.optim.Adam(weights, lr=0.02)
for step in range(12):
    draw = torch.Generator().manual_seed(1000 * step + rank)
    noise = [torch.randn(w.shape, generator=draw) for w in weights]
    scores = []
    with torch.no_grad():
        for sign in (1, -1):
            tried = [w + 0.05 * sign * e for w, e in zip(weights, noise, strict=True)]
            found = x @ tried[0].T + tried[1]
            scores.append((found[:, 0] - x.sum(1)).square().mean())
    for weight, direction in zip(weights, noise, strict=True):
        weight.grad = (scores[0] - scores[1]) / 0.1 * direction
        dist.all_reduce(weight.grad)
        weight.grad /= size
    optimizer.step()
    if rank == 0:
        print(step, scores[0].item())
dist.destroy_process_group()
