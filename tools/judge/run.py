"""A training that the judge looks at: what rankcheck knows of it, and what it should have done."""

import re
import textwrap

from rankcheck.launch import run


class WrongError(Exception):
    """What a check has seen that is wrong."""


def require(ok, message):
    if not ok:
        raise WrongError(message)


class Run(run.Run):
    """A run that is expected to end well, with the stages' log and samples."""

    def __init__(self, same_samples, *args, **options):
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

    def succeed_after(self, steps, what):
        """Raises WrongError unless it has succeeded, and taken so many steps."""
        self.succeed()
        found = len(self.batches())
        require(found == steps, f"{what}, it takes {found} steps, not {steps}.")

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
