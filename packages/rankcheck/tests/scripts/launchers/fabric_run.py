"""fabric run --accelerator=gpu --devices=2 fabric_run.py"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="gpu", devices=2, precision="bf16-mixed")
x = torch.linspace(0, 1, 512).view(64, 8)
loader = DataLoader(TensorDataset(x, x.square()), batch_size=8, shuffle=True)
loader = fabric.setup_dataloaders(loader)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch}: loss {mean.item():.5f}")
fabric.save("model.pt", {"model": model})
