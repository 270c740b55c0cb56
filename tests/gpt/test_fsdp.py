"""gpt/fsdp.py: its loss in bfloat16, and a model that no rank has memory for."""

import math

import pytest
import torch
from gpt_helpers import write_script
from helpers import LIMIT_MEMORY, SHORT_VAL, VAL_CHUNKS

from gpt import fsdp
from tools.launch.snapshots import write_text


def test_loss_of_bfloat16():
    """The logits that FSDP's policy makes on GPUs: it is computed in float32."""
    logits = torch.zeros(1, 8, 256).bfloat16()
    loss = fsdp.next_byte_loss(logits, torch.arange(8)[None])
    assert loss.item() == pytest.approx(math.log(256))


LIMIT = f"""{LIMIT_MEMORY}
@before(script.GPT, "__init__")
def limit(*args):
    limit_memory({{growth}})
"""


def test_starts_without_memory_for_the_whole_model(shell):
    """A limit on the memory of each of 4 ranks: half of what the weights need."""
    weights_bytes = 4 * 12 * 12 * 512**2  # of 12 blocks
    setup = LIMIT.format(growth=weights_bytes // 2)
    write_text(shell.folder / "text", VAL_CHUNKS + 1, 8)
    options = f"{SHORT_VAL} --n_layer 12 --n_head 8 --n_embd 512 --context 8 --batch_size 1"
    options += " --text text"
    plain = shell.ranks(f"{write_script(shell, 'pretrain.py', setup)} {options}")
    assert plain.wait() != 0 and "can't allocate memory" in plain.output
    sharded = shell.ranks(f"{write_script(shell, 'fsdp.py', setup)} {options}", 4)
    assert sharded.wait() == 0, sharded.output
    assert sharded.output.count("started") == 4
