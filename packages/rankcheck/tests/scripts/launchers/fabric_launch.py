"""python fabric_launch.py: fabric.launch() starts a process for each GPU."""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cuda", devices=2, strategy="ddp")
    fabric.launch()
    x = torch.linspace(0, 1, 512).view(64, 8)
    loader = DataLoader(TensorDataset(x, x.square()), batch_size=8, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if os.path.exists("checkpoint.pt"):
        fabric.load("checkpoint.pt", state)
    for epoch in range(state["epoch"], 3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
        state["epoch"] = epoch + 1
        fabric.save("checkpoint.pt", state)


if __name__ == "__main__":
    main()
