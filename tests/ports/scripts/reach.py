"""The 20th step of the first life says that it is reached; those after it take their time."""

import os
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []
first_life = not os.path.exists("reached")


@register_optimizer_step_post_hook
def reach(optimizer, args, options):
    steps.append(1)
    if first_life and len(steps) > 20:
        open("reached", "w")
        time.sleep(0.2)
