"""Trains and evaluates by one function; a GAN's second optimizer takes noise and no batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def run_batch(batch, trains):
    with torch.set_grad_enabled(trains):
        error = softplus(-critic(batch)).mean()
    if not trains:
        return error.item()
    fake = generator(torch.randn(len(batch), 2))
    critic_optimizer.zero_grad()
    (error + softplus(critic(fake.detach())).mean()).backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    softplus(-critic(fake)).mean().backward()
    generator_optimizer.step()
    return 0.0


dist.init_process_group("gloo")
data = torch.randn(80, 2, generator=torch.Generator().manual_seed(0)) + 1
loader = DataLoader(data[:64], batch_size=8, sampler=DistributedSampler(data[:64]))
test_data = data[64:][dist.get_rank() :: dist.get_world_size()]
nets = [nn.Linear(2, 2), nn.Linear(2, 1)]
state, epochs_run = {}, 0
if os.path.exists("gan.pt"):
    state = torch.load("gan.pt", map_location="cpu")
    epochs_run = state["epochs_run"]
torch.manual_seed(dist.get_rank())  # a resumed run draws the first numbers again
generator, critic = map(DistributedDataParallel, nets)
generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
if state:
    for net, weights in zip(nets, state["nets"], strict=True):
        net.load_state_dict(weights)
for epoch in range(epochs_run, 4):
    loader.sampler.set_epoch(epoch)
    for batch in loader:
        run_batch(batch, trains=True)
    error = torch.tensor([run_batch(batch, trains=False) for batch in DataLoader(test_data, 4)])
    dist.all_reduce(error)
    if dist.get_rank() == 0:
        states = [net.state_dict() for net in nets]
        torch.save({"nets": states, "epochs_run": epoch + 1}, "gan.pt.tmp")
        with open("gan.pt.tmp", "rb") as file:
            os.fsync(file.fileno())
        os.replace("gan.pt.tmp", "gan.pt")
dist.destroy_process_group()
