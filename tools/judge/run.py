"""A training that the judge looks at: what rankcheck knows of it, and what it should have done."""

import re
import textwrap

from rankcheck.launch import run


class WrongError(Exception):
    """What a check has seen that is wrong."""


class Run(run.Run):
    """A run that is expected to end well, with the stages' log and samples."""

    def __init__(self, *args, same_samples=False, **options):
        self.same_samples = same_samples  # on all ranks
        super().__init__(*args, **options)

    def require(self, ok, message):
        """Raises WrongError with the last lines of the run, unless it is `ok` and has ended."""
        if not (ok and self.statuses):
            message = self.hangs or f"{message} "
            if "collective mismatch" in self.output:
                message += "The ranks have called different collectives. "
            lines = self.lines() or ["nothing"]
            shown = "\n".join(lines[:9] + ["…"] * (len(lines) > 12) + lines[9:][-3:])
            raise WrongError(f"{message}It has printed:\n{textwrap.indent(shown, '| ')}")

    def succeed(self):
        self.require(self.succeeded, "The run failed.")

    def losses(self):
        """Returns the logged loss of each epoch."""
        # resumable.py and what builds on it log `epoch 1 + 640 samples` within an epoch.
        lines = r"^epoch (\d+)(?: \+ 0 samples)? \|.*\bloss ([-+.\w]+)"
        return {int(epoch): float(loss) for epoch, loss in re.findall(lines, self.output, re.M)}

    def batches(self):
        """Returns the samples of each step, of all ranks together."""
        return [
            [sample for step in ranks for sample in step["samples"]]
            for ranks in zip(*self.steps[: 1 if self.same_samples else None], strict=False)
        ]
