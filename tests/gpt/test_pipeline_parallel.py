"""gpt/pipeline_parallel.py: the schedule that its page writes by hand, and what its stages take."""

import pytest
from gpt_helpers import FLOAT64, start, weights_diff
from helpers import fences


@pytest.mark.long
def test_schedule_by_hand(shell):
    """The one on the page, in place of the library's."""
    (schedule,) = fences("gpt/pipeline_parallel.md", "python")
    setup = f"""{FLOAT64}
dist = script.dist
{schedule}
script.Schedule1F1B = Schedule1F1B
script.Trainer._evaluate = lambda self: None
"""
    options = "--n_layer 4 --learning_rate 0.02"
    start(shell, "pretrain.py", "one", setup=FLOAT64, options=options).succeeds()
    options += " --pp_size 4 --micro_batches 6"
    start(shell, "pipeline_parallel.py", "several", 4, setup, options).succeeds()
    assert weights_diff(shell, "several", "one") < 1e-12
