"""Stands in for timm: a tiny network with batch normalization, as in its ResNets."""

from torch import nn


def create_model(name, pretrained=False):
    layers = (
        nn.Conv2d(3, 8, 3, 2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(8, 10))
