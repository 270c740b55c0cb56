"""Train a classifier of images on one device: python ports/images_single.py 20"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """`size` noisy images of shape (1, 8, 8), each with its class, one of 10."""

    def __init__(self, size, seed, augment=False):
        patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=generator)
        self.images = patterns[self.labels] + 2 * torch.randn(size, 1, 8, 8, generator=generator)
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # shifts it by up to a pixel
            image = image.roll(random.randint(-1, 1), 2)
        return image, self.labels[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 10),
    )


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    totals = torch.zeros(2, dtype=torch.int64, device=device)  # right answers, all answers
    for images, labels in loader:
        totals[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        totals[1] += len(labels)
    return (totals[0] / totals[1]).item()


def train(model, train_loader, val_loader, device, args):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best_accuracy = 0.0
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        accuracy = evaluate(model, val_loader, device)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            torch.save(model.state_dict(), "best.pt")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    return parser.parse_args()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_set = Images(1000, 1, augment=True)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_set = Images(501, 2)
    val_loader = DataLoader(val_set, args.batch_size)
    model = make_model().to(device)
    train(model, train_loader, val_loader, device, args)


if __name__ == "__main__":
    main(parse_args())
