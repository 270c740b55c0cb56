"""Each step takes 0.3 seconds; rank 1 gets a signal at the fifth."""

import os
import time

from patched import before, script
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = 0


@register_optimizer_step_post_hook
def slow_down(optimizer, args, options):
    global steps
    steps += 1
    time.sleep(0.3)
    if steps == 5 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 15)


@before(script, "save")
def log_steps(state, path):
    print(steps, "steps")
