"""gpt/hsdp.py: micro-batches in hybrid shards, with the line of its page."""

import re

import pytest
from gpt_helpers import FLOAT64, start, weights_diff
from helpers import SHORT_GPT, fences

from tools.compose.compose import compose

COUNT_ALL_REDUCES = """
reduced = []
@before(script.dist, "all_reduce")
def count(tensor, *arguments, **options):
    if tensor.numel() > 100:
        reduced.append(tensor)
@after(script.Trainer, "_run_batch")
def print_count(self, inputs, targets):
    print("summed over the nodes:", len(reduced))
"""


@pytest.mark.long
def test_micro_batches_in_hybrid_shards(shell):
    """With the line of the page, as many all-reduces of gradients as without micro-batches."""
    lines = [line for line, _ in compose(["gpt/accumulate.py", "gpt/hsdp.py"], "own.py")]
    place = lines.index("            micro_inputs = inputs[start:end]")
    lines[place:place] = fences("gpt/hsdp.md", "python")
    (shell.folder / "own").write_text("\n".join(lines))
    own = f"exec(open('own').read(), script.__dict__)\n{SHORT_GPT}{FLOAT64}{COUNT_ALL_REDUCES}"
    start(shell, "pretrain.py", "one", setup=FLOAT64).succeeds()
    found = []
    for size in (1, 3):
        options = f"--shard_size 2 --micro_batch_size {size}"
        output = start(shell, "hsdp.py", f"s{size}", 4, own, options).succeeds()
        found.append(re.findall(r"summed over the nodes: (\d+)", output)[-1])
        assert weights_diff(shell, f"s{size}", "one") < 1e-12
    assert found[0] == found[1] != "0"
