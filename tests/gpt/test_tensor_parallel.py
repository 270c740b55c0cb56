"""gpt/tensor_parallel.py: the loss-parallel form that its page shows."""

import difflib
import re

import pytest
from gpt_helpers import assert_split_is_one_rank
from helpers import SHORT_GPT, fences

from tools.steps import ROOT


@pytest.mark.long
def test_loss_parallelism(shell):
    """With the lines of the page in place of those that are most like them."""
    lines = (ROOT / "gpt" / "tensor_parallel.py").read_text().splitlines()
    (shown,) = fences("gpt/tensor_parallel.md", "python")
    for change in re.split(r"\n?# in .*\n", shown.rstrip())[1:]:
        (old,) = difflib.get_close_matches(change.splitlines()[-1], lines, 1)
        lines[lines.index(old)] = change
    (shell.folder / "changed").write_text("\n".join(lines))
    changed = f"exec(open('changed').read(), script.__dict__)\n{SHORT_GPT}"
    assert_split_is_one_rank(shell, "tensor_parallel.py", [(4, "--tp_size 2")], changed)
