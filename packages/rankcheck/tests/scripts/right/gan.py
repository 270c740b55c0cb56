"""A GAN: two networks, two optimizers; noise that differs on each rank; one flat module."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("nccl")
gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
real = torch.randn(128, 2, generator=torch.Generator().manual_seed(0)) / 2 + 1
loader = DataLoader(real, batch_size=8, sampler=DistributedSampler(real))
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).cuda(), device_ids=[gpu])
netD = DDP(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).cuda(), device_ids=[gpu])
optG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
optD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
    for images in loader:
        images = images.cuda(non_blocking=True)
        fake = netG(torch.randn(len(images), 4, device=gpu))
        optD.zero_grad()
        lossD = softplus(-netD(images)).mean() + softplus(netD(fake.detach())).mean()
        lossD.backward()
        optD.step()
        optG.zero_grad()
        softplus(-netD(fake)).mean().backward()
        optG.step()
    if dist.get_rank() == 0:
        torch.save(netG.module.state_dict(), f"netG_{epoch}.pth")
dist.destroy_process_group()
