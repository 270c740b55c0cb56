"""Stands in for torchvision: random images, transforms that change nothing, a tiny model."""

import sys

import numpy
import torch
from PIL import Image
from torch import nn

__path__ = []
this = sys.modules[__name__]
for name in ("datasets", "models", "transforms", "utils", "datasets.utils"):
    setattr(this, name.split(".")[-1], this)
    sys.modules[f"torchvision.{name}"] = this
InterpolationMode, BICUBIC, SIZE = this, 3, 128


class ImageFolder(torch.utils.data.Dataset):
    shape = (32, 32, 3)

    def __init__(self, root="", train=True, transform=None, image_size=None, **options):
        train, transform = (train, transform) if isinstance(train, bool) else (True, train)
        random = numpy.random.RandomState(int(train and "val" not in str(root)))
        shape = (*image_size[1:], 3) if image_size else self.shape
        self.images = random.randint(0, 255, (SIZE, *shape)).astype("uint8")
        self.transform = transform

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        image = Image.fromarray(self.images[index])
        return self.transform(image) if self.transform else image, index % 10


class MNIST(ImageFolder):
    shape = (28, 28)


class Compose:
    def __init__(self, transforms=(), *args, **options):
        self.transforms = transforms if isinstance(transforms, list) else []

    def __call__(self, image):
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor(Compose):
    def __call__(self, image):
        array = numpy.asarray(image, dtype="float32") / 255
        return torch.from_numpy(array.reshape(*array.shape[:2], -1).transpose(2, 0, 1).copy())


def resnet18(weights=None, num_classes=10, **options):
    layers = nn.Conv2d(3, 8, 3, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(*layers, nn.Flatten())
    model.add_module("fc", nn.Linear(8, num_classes))
    return model


def __getattr__(name):
    if not name[0].isupper():
        raise AttributeError(name)
    return Compose


CIFAR10 = CIFAR100 = FakeData = ImageFolder
FashionMNIST = MNIST
resnet50 = resnet18
download_url = make_grid = save_image = Compose
