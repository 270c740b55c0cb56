"""Train a GAN that draws points near eight centers, on one device: python ports/gan_single.py 30"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader

NOISE_SIZE = 8
CENTERS = torch.tensor([[math.cos(k * math.pi / 4), math.sin(k * math.pi / 4)] for k in range(8)])


def make_points(size):
    """Returns points of shape (size, 2), each near one of the centers."""
    generator = torch.Generator().manual_seed(1)
    centers = CENTERS[torch.randint(8, (size,), generator=generator)]
    return centers + 0.05 * torch.randn(size, 2, generator=generator)


def make_model(n_inputs, n_outputs):
    return nn.Sequential(
        nn.Linear(n_inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, n_outputs),
    )


def draw_noise(size, device):
    return torch.randn(size, NOISE_SIZE, device=device)


@torch.no_grad()
def evaluate(generator, noise):
    """Returns the mean distance of drawn points from the nearest center."""
    distances = torch.cdist(generator(noise), CENTERS.to(noise))
    return distances.min(dim=1).values.mean().item()


def train(generator, discriminator, loader, device, args):
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
    loss_fn = nn.BCEWithLogitsLoss()
    fixed_noise = torch.randn(1000, NOISE_SIZE, device=device)
    for epoch in range(args.epochs):
        for points in loader:
            points = points.to(device)
            real = torch.ones(len(points), 1, device=device)
            fake = torch.zeros(len(points), 1, device=device)

            d_optimizer.zero_grad()
            loss_fn(discriminator(points), real).backward()
            drawn = generator(draw_noise(len(points), device))
            loss_fn(discriminator(drawn.detach()), fake).backward()
            d_optimizer.step()

            g_optimizer.zero_grad()
            loss_fn(discriminator(drawn), real).backward()
            g_optimizer.step()
        distance = evaluate(generator, fixed_noise)
        print(f"epoch {epoch + 1}: mean distance from a center {distance:.4f}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=30)
    parser.add_argument("--batch_size", type=int, default=64)
    return parser.parse_args()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    points = make_points(2000)
    loader = DataLoader(points, args.batch_size, shuffle=True)
    generator = make_model(NOISE_SIZE, 2).to(device)
    discriminator = make_model(2, 1).to(device)
    train(generator, discriminator, loader, device, args)


if __name__ == "__main__":
    main(parse_args())
