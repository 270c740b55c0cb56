"""Leaves out the fourth step, in its own way."""

import copy

from patched import after, before, script


@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    self.before = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])


@after(script.Trainer, "_run_batch")
def undo(self, inputs, targets):
    if self.samples_run == 48:  # the position follows the step
        self.model.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(self.before[1])
