"""The gradient's norm in the fourth step of the second node is nan."""

import os

from torch import nn

clip = nn.utils.clip_grad_norm_
norms = []


def clip_to_nan(parameters, max_norm):
    norms.append(clip(parameters, max_norm))
    bad = len(norms) == 4 and os.environ["GROUP_RANK"] == "1"
    return norms[-1] * (float("nan") if bad else 1)


nn.utils.clip_grad_norm_ = clip_to_nan
