"""Each step has a bug; and once, the others have died while a process forms its first group."""

from patched import script

form = script.Group.form


def form_at_the_second_try(self):
    script.Group.form = form
    raise RuntimeError("another has died")


script.Group.form = form_at_the_second_try


def run_batch(self, inputs, targets):
    raise RuntimeError("a bug")


script.Trainer._run_batch = run_batch
