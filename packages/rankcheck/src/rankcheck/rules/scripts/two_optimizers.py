"""A generator and a discriminator, each with an optimizer; a stream of data."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        samples = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
        yield from samples[dist.get_rank() :: dist.get_world_size()]


def real(score, is_real):
    return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, is_real))


dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.manual_seed(dist.get_rank())
generator = DistributedDataParallel(nn.Linear(2, 4).to(device))
discriminator = DistributedDataParallel(nn.Linear(4, 1).to(device))
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
for batch in DataLoader(Stream(), batch_size=8):
    batch = batch.to(device)
    fake = generator(torch.randn(8, 2, device=device))
    optimizers[1].zero_grad()
    loss = real(discriminator(torch.cat([batch, fake.detach()])), 1.0)
    loss.backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
    real(discriminator(fake), 1.0).backward()
    optimizers[0].step()
dist.destroy_process_group()
