"""The original takes the samples in the port's order, which the epoch decides."""

import torch
from patched import script

DataLoader = script.DataLoader


class Order(torch.utils.data.Sampler):
    epoch = -1

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        Order.epoch += 1
        generator = torch.Generator().manual_seed(Order.epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())


def load_in_order(dataset, batch_size, shuffle=False, **options):
    return DataLoader(dataset, batch_size, sampler=Order(dataset) if shuffle else None, **options)


script.DataLoader = load_in_order
