"""Stands in for Hugging Face datasets: a streamed "c4" of a few shards.

Shards go to ranks (split_dataset_by_node) and, in a data worker, to workers, as datasets 2.10 does.
"""

import random
import sys
import types

import torch

PER_SHARD = 64


class IterableDataset(torch.utils.data.IterableDataset):
    def __init__(self, shards, start):
        self.shards, self.start, self.seed, self.function = shards, start, None, None

    def copy(self, **changes):
        new = IterableDataset(self.shards, self.start)
        new.__dict__.update(self.__dict__, **changes)
        return new

    def shuffle(self, seed):
        shards = list(self.shards)
        random.Random(seed).shuffle(shards)
        return self.copy(seed=seed, shards=shards)

    def map(self, function, batched, remove_columns):
        return self.copy(function=function)

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        shards = self.shards if info is None else self.shards[info.id :: info.num_workers]
        indices = [self.start + shard * PER_SHARD + i for shard in shards for i in range(PER_SHARD)]
        if self.seed is not None:
            for i in range(0, len(indices), 32):
                buffer = indices[i : i + 32]
                random.Random(self.seed).shuffle(buffer)
                indices[i : i + 32] = buffer
        for index in indices:
            example = {"text": str(index), "timestamp": "", "url": ""}
            if self.function is None:
                yield example
            else:
                yield {
                    k: v[0].tolist() for k, v in self.function({"text": [example["text"]]}).items()
                }


def load_dataset(path, name, split, streaming):
    return IterableDataset(range(32), 0) if split == "train" else IterableDataset(range(2), 10**6)


def split_dataset_by_node(dataset, rank, world_size):
    return dataset.copy(shards=dataset.shards[rank::world_size])


class Tokenizer:
    """Stands in for T5's: a text that is a number becomes tokens drawn from it, padded with 0."""

    pad_token_id = 0

    def __call__(self, texts, max_length, truncation, padding, return_tensors):
        rows = []
        for text in [texts] if isinstance(texts, str) else texts:
            r = random.Random(int(text))
            row = [r.randrange(1, 100) for _ in range(r.randrange(max_length // 2, max_length + 1))]
            rows.append(row + [0] * (max_length - len(row)))
        ids = torch.tensor(rows)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}


distributed = types.ModuleType("datasets.distributed")
distributed.split_dataset_by_node = split_dataset_by_node
sys.modules["datasets.distributed"] = distributed
Dataset = IterableDataset
__path__ = []
