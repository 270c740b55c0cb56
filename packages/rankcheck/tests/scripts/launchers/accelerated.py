"""accelerate launch accelerated.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

config = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(mixed_precision="fp16", project_config=config)
x = torch.linspace(0, 1, 512).view(64, 8)
loader = DataLoader(TensorDataset(x, x.square()), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(3):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    losses = accelerator.gather(loss.detach())
    accelerator.print(f"epoch {epoch}: loss {losses.mean().item():.5f}")
accelerator.wait_for_everyone()
accelerator.save_model(model, "run/model")
accelerator.end_training()
