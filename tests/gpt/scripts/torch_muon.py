"""torch's own Muon for the matrices of the blocks, in the weights' type."""

import torch
from patched import script

torch.Tensor.bfloat16 = lambda self: self  # to which torch's Muon would cast
configure_adamw = script.configure_optimizer


def configure(model, learning_rate):
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = configure_adamw(model, learning_rate)

    def step_first(optimizer, *arguments):
        muon.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        muon.step()
        muon.zero_grad()  # AdamW then leaves them alone

    adamw.register_step_pre_hook(step_first)
    return adamw


script.configure_optimizer = configure
