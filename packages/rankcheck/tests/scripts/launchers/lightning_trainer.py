"""python lightning_trainer.py: the Trainer starts a process for each GPU."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Squares(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    x = torch.linspace(0, 1, 512).view(64, 8)
    loader = DataLoader(TensorDataset(x, x.square()), batch_size=8, shuffle=True)
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(dirpath="run", save_last=True)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=2,
        strategy="ddp",
        precision="16-mixed",
        max_epochs=3,
        callbacks=[checkpoint],
        logger=False,
    )
    trainer.fit(Squares(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
