# https://github.com/pyg-team/pytorch_geometric at 5c6461b230
# rankcheck --empty /CLONE/examples/multi_gpu/distributed_sampling.py
# A stand-in for torch_geometric samples neighbors of a random graph. The script saves nothing
cd /CLONE/examples/multi_gpu
ed -s distributed_sampling.py <<'END'
102c
    model = SAGE(dataset.num_features, 16, dataset.num_classes).to(rank)
.
82,83c
        num_workers=0,
        persistent_workers=False,
.
80c
        num_neighbors=[5, 3],
.
79c
        batch_size=8,
.
w
END
cat > torch_geometric.py <<'END'
"""Stands in for torch_geometric: a random graph, a loader that samples neighbors, a mean layer."""

import sys

import torch
from torch import nn

__path__ = []
for name in ("datasets", "loader", "nn"):
    sys.modules[f"torch_geometric.{name}"] = sys.modules[__name__]


class Data:
    def to(self, device, *names):
        for name in names:
            setattr(self, name, getattr(self, name).to(device))
        return self


class Reddit:
    num_features, num_classes, num_nodes = 8, 4, 128

    def __init__(self, root):
        generator = torch.Generator().manual_seed(0)
        self.data = Data()
        self.data.x = torch.randn(self.num_nodes, self.num_features, generator=generator)
        self.data.y = torch.randint(self.num_classes, (self.num_nodes,), generator=generator)
        self.data.edges = torch.randint(self.num_nodes, (self.num_nodes, 10), generator=generator)
        nodes = torch.arange(self.num_nodes)
        self.data.train_mask = nodes % 4 < 2
        self.data.val_mask = nodes % 4 == 2
        self.data.test_mask = nodes % 4 == 3

    def __getitem__(self, index):
        return self.data


class NeighborLoader(torch.utils.data.DataLoader):
    def __init__(self, data, input_nodes, num_neighbors, **options):
        self.data, self.num_neighbors = data, num_neighbors
        super().__init__(input_nodes.tolist(), collate_fn=self.sample, **options)

    def sample(self, nodes):
        ids, sources, targets, last = list(nodes), [], [], nodes
        for count in self.num_neighbors:
            hop = []
            for node in last:
                neighbors = self.data.edges[node][torch.randperm(10)[:count]].tolist()
                hop += [neighbor for neighbor in neighbors if neighbor not in ids + hop]
                sources += neighbors
                targets += [node] * len(neighbors)
            ids, last = ids + hop, hop
        place = {node: i for i, node in enumerate(ids)}
        edges = [[place[node] for node in ends] for ends in (sources, targets)]
        return len(nodes), torch.tensor(ids), torch.tensor(edges)

    def __iter__(self):
        for size, ids, edge_index in super().__iter__():
            batch = Data()
            batch.batch_size, batch.edge_index = size, edge_index
            batch.x, batch.y = self.data.x[ids], self.data.y[ids]
            yield batch


class SAGEConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin_l = nn.Linear(in_channels, out_channels)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x, edge_index):
        source, target = edge_index
        total = torch.zeros_like(x).index_add(0, target, x[source])
        count = torch.zeros(len(x), 1).index_add(0, target, torch.ones(len(target), 1))
        return self.lin_l(total / count.clamp(min=1)) + self.lin_r(x)
END
