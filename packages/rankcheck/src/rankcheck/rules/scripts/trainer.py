"""A trainer of one's own: accumulates, scales, clips, evaluates, logs the loss of all ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


class Trainer:
    def __init__(self, model, data, device):
        self.model = DistributedDataParallel(model.to(device), device_ids=[device.index])
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
        self.device = device
        train, self.val = random_split(data, [64, 16], torch.Generator().manual_seed(0))
        self.loader = DataLoader(train, 4, sampler=DistributedSampler(train))

    def loss(self, model, batch):
        inputs, targets = (part.to(self.device) for part in batch)
        return nn.functional.mse_loss(model(inputs), targets)

    def backward(self, batch):
        loss = self.loss(self.model, batch) / 2
        self.scaler.scale(loss).backward()
        self.total += loss.detach()

    def step(self, first, second):
        with self.model.no_sync():
            self.backward(first)
        self.backward(second)
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses = [self.loss(self.model.module, batch) for batch in DataLoader(self.val, 4)]
        self.model.train()
        return torch.stack(losses).mean()

    def states(self):
        return {"model": self.model.module, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self, epoch):
        states = {name: part.state_dict() for name, part in self.states().items()}
        with open("last.tmp", "wb") as file:
            torch.save({**states, "epoch": epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace("last.tmp", "last.pt")

    def log(self, text):
        print(text, flush=True)

    def fit(self, epochs):
        state = torch.load("last.pt", map_location="cpu") if os.path.exists("last.pt") else {}
        for name in self.states() if state else []:
            self.states()[name].load_state_dict(state[name])
        for epoch in range(state.get("epoch", 0), epochs):
            self.loader.sampler.set_epoch(epoch)
            self.total = torch.zeros((), device=self.device)
            batches = list(self.loader)
            for first, second in zip(batches[::2], batches[1::2], strict=True):
                self.step(first, second)
            dist.all_reduce(self.total)
            val = self.evaluate()
            if dist.get_rank() == 0:
                loss = self.total.item() / len(batches) / dist.get_world_size() * 2
                self.log(f"epoch {epoch} loss {loss:.5f}")
                self.log(f"epoch {epoch} val {val:.5f}")
                self.save(epoch + 1)
            dist.barrier()


if __name__ == "__main__":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    inputs = torch.randn(80, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    Trainer(model, TensorDataset(inputs, inputs.sum(1, keepdim=True)), device).fit(4)
    dist.destroy_process_group()
