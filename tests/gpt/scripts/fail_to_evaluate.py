"""Each rank is killed after the evaluation FAIL_AT, as if it had failed; a save takes a second."""

import os
import time

import torch
from patched import after, before, script


@after(script.Trainer, "_evaluate")
def fail(self):
    if os.environ.get("FAIL_AT") == f"{self.epochs_run} {self.samples_run}":
        os._exit(1)


@before(script.GPT, "forward")
def check_mode(self, tokens):  # which dropout would depend on
    assert self.training == torch.is_grad_enabled()


if hasattr(script, "dcp"):

    @before(script.dcp.FileSystemWriter, "finish")
    def take_a_second(*arguments, **options):
        time.sleep(1)
