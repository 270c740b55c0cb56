"""Each rank takes all samples, in an order of its own."""

from patched import script

sampler = script.DistributedSampler


class OwnOrder(sampler):
    def set_epoch(self, epoch):
        super().set_epoch(epoch + script.dist.get_rank())


def all_samples_in_own_order(dataset, seed):
    return OwnOrder(dataset, num_replicas=1, rank=0, seed=seed)


script.DistributedSampler = all_samples_in_own_order
