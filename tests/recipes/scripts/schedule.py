"""A reader's schedule, whose rate is in the optimizer's state; and a kill right after a save."""

import os

from patched import after, before, script


@after(script.Trainer, os.environ["STEPS_AFTER"])
def step_schedule(self, *arguments):
    if hasattr(self, "trains"):  # not when a start evaluates
        self.optimizer.param_groups[0]["lr"] *= 0.9


@before(script.Trainer, "_run_epoch")
def start(self, epoch):
    self.trains = True


@after(script.Trainer, "_save_snapshot")
def kill(self):
    self.saves = getattr(self, "saves", 0) + 1
    if str(self.saves) == os.environ.get("KILL_AFTER"):
        os.kill(os.getpid(), 9)
