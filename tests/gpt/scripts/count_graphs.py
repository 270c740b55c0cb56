"""Compiles without generating code; counts what it is given, and why Dynamo cuts."""

import functools

import torch
from patched import after, script
from torch._dynamo.utils import counters

graphs = []


def count(graph, inputs):
    graphs.append(any(isinstance(size, torch.SymInt) for size in inputs))
    return graph


torch.compile = functools.partial(torch.compile, backend=count)


@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    breaks = dict(counters["graph_break"])
    print(f"{len(graphs)} graphs, {sum(graphs)} of any size, breaks: {breaks}", end=" ")
    print(torch.get_float32_matmul_precision())
