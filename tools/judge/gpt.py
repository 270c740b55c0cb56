"""The checks of a script of gpt/, which is compared with a file of ours on one process."""

import functools
import re

from tools.judge.judge import Judge
from tools.judge.run import require
from tools.judge.stages import CHUNKS, EPOCHS, GPT_OPTIONS, VAL_CHUNKS
from tools.launch.snapshots import load_gpt, write_text
from tools.steps import ROOT


class GptJudge(Judge):
    dataset_size = CHUNKS
    loss_tolerance = 1e-4
    read_snapshot = staticmethod(load_gpt)
    wrong_start = (
        "weights are not those of one process: a rank that draws its shard alone draws other"
        ' numbers. Read "Sharding the model" (docs/gpt/fsdp.md).'
    )

    def __init__(self, stage, file, task, folder):
        super().__init__(stage, file, task, folder)
        self.variables["PROBE_FLOAT64"] = "1"
        write_text(folder / "text", VAL_CHUNKS + CHUNKS, 8)

    @functools.cached_property
    def whole(self):
        """Returns the run of the reference, on one process."""
        stage = self.stage._replace(options=f"{GPT_OPTIONS} --batch_size 16")
        one = GptJudge(stage, ROOT / self.stage.reference, None, self.folder)
        one.shell = self.shell  # which ends what it has started
        run = one.run(EPOCHS, "reference", nodes=["."])
        run.succeed()
        return run

    def weights(self, snapshot):
        """Returns the weights by name, since folders of shards have no order."""
        model = self.load(snapshot)["model"]
        return [model[name] for name in sorted(model)]

    def right_weights(self, run):
        """Returns the weights of the reference, which takes the same batches as each run."""
        self.whole.succeed()
        return self.weights("reference")

    def right_loss(self, epoch):
        return self.whole.losses()[epoch]

    def compare_start(self):
        if "sharded" in self.stage.checks:
            super().compare_start()

    def check_loss(self):
        super().check_loss()
        runs = self.straight, self.whole
        found, expected = (re.findall(r"^val loss ([^\s,]+)", run.output, re.M) for run in runs)
        require(found == expected, f"It logs val losses of {found}, not {expected}.")
