"""Accelerate: bfloat16, and all that it has prepared in one folder per epoch."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(mixed_precision="bf16", dataloader_config=config)
set_seed(42)
x = torch.randn(128, 8)
loader = DataLoader(TensorDataset(x, x.cumsum(1)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = len([*Path().glob("epoch_*")])
if done:
    accelerator.load_state(f"epoch_{done - 1}")
for epoch in range(done, 4):
    loader.set_epoch(epoch)
    total = torch.zeros((), device=accelerator.device)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.reduce(total, "mean").item() / len(loader)
    accelerator.print(f"epoch {epoch}: loss {mean:.5f}")
    accelerator.save_state("saving")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.rename("saving", f"epoch_{epoch}")
    accelerator.wait_for_everyone()
accelerator.end_training()
