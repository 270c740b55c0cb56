"""The checks of a script of by_hand/ whose optimizer has a part of each weight, flat or not."""

import functools

from tools.judge.run import require
from tools.judge.toy import ToyJudge


class ShardsJudge(ToyJudge):
    wrong_start = "shards are not of rank 0's weights."

    @functools.cached_property
    def whole(self):
        """Returns a run on one process, which has all shards."""
        run = self.run(1, "alone", nodes=["."])
        run.require(run.succeeded and run.steps, "On one process, it fails.")
        return run

    def compare_ranks(self, number, ranks):
        running = any(step["running"] for step in ranks)
        require(not running, "The optimizer steps before each reduce-scatter has ended.")
