"""Counts the all-reduces of gradients between nodes, of all steps so far."""

from patched import after, before, script

reduced = []


@before(script.dist, "all_reduce")
def count(tensor, *arguments, **options):
    if tensor.numel() > 100:
        reduced.append(tensor)


@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    print("summed over the nodes:", len(reduced))
