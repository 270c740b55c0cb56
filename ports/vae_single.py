"""Train a variational autoencoder of images on one device: python ports/vae_single.py 20"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

N_LATENT = 4


def make_images(size, seed):
    """Returns images of shape (size, 64): a bright square of 4 x 4 pixels somewhere in 8 x 8."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.zeros(size, 8, 8)
    for image in images:
        top, left = torch.randint(5, (2,), generator=generator).tolist()
        image[top : top + 4, left : left + 4] = 1
    return images.flatten(1)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2 * N_LATENT))
        self.decoder = nn.Sequential(nn.Linear(N_LATENT, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, images):
        mean, log_var = self.encoder(images).chunk(2, dim=1)
        codes = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decoder(codes), mean, log_var, codes


def reconstruction_error(logits, images):
    return F.binary_cross_entropy_with_logits(logits, images, reduction="sum")


def kl_divergence(mean, log_var):
    return -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()


def correlation(codes):
    """Returns how far a batch's codes are from uncorrelated, as in DIP-VAE."""
    covariance = codes.T @ codes / len(codes)
    return (covariance - torch.eye(N_LATENT).to(codes)).square().sum()


@torch.no_grad()
def evaluate(model, images):
    """Returns the mean reconstruction error of an image, from the mean of its code."""
    mean, _ = model.encoder(images).chunk(2, dim=1)
    return reconstruction_error(model.decoder(mean), images).item() / len(images)


def train(model, train_loader, val_images, device, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(args.epochs):
        for images in train_loader:
            images = images.to(device)
            logits, mean, log_var, codes = model(images)
            loss = reconstruction_error(logits, images) + kl_divergence(mean, log_var)
            loss = loss / len(images) + correlation(codes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: error {evaluate(model, val_images):.4f}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("epochs", nargs="?", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=64)
    return parser.parse_args()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    train_set = make_images(1025, 1)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    val_images = make_images(501, 2).to(device)
    train(VAE().to(device), train_loader, val_images, device, args)


if __name__ == "__main__":
    main(parse_args())
