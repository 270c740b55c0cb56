"""gpt/skip_steps.py, and those that build on it: a gradient that is NaN."""

import pytest
from gpt_helpers import TINY, write_tiny_text
from helpers import SHORT_GPT, SHORT_VAL, SIGNAL, patch, read_script

from tools.launch.snapshots import load_gpt, max_abs_diff

# Of rank 1, in the fourth step: the loss stays finite.
BAD_GRADIENT = """
loss_fn = script.next_byte_loss
def loss_of_bad_gradient(logits, targets):
    if logits.requires_grad and script.dist.get_rank() == 1 and trained == [48]:
        logits.register_hook(lambda gradient: gradient * float('nan'))
    return loss_fn(logits, targets)
script.next_byte_loss = loss_of_bad_gradient
trained = []
@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    trained[:] = [self.samples_run]
"""
# Leaves out the fourth step, in its own way.
UNDO_STEP = """
import copy
@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    self.before = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
@after(script.Trainer, "_run_batch")
def undo(self, inputs, targets):
    if self.samples_run == 48:  # the position follows the step
        self.model.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(self.before[1])
"""


@pytest.mark.parametrize("name", ["gpt/skip_steps.py", "gpt/fsdp.py"])
def test_gradient_that_is_nan(shell, name):
    """All ranks end, and say of which step it was; --skip_steps goes past it."""
    write_tiny_text(shell)
    float64 = f"{SHORT_GPT}torch.set_default_dtype(torch.float64)\n"
    float64 += "torch.Tensor.float = torch.Tensor.double\n"
    script = patch(shell.folder, name, float64 + SIGNAL + BAD_GRADIENT)
    options = f"1 {TINY} {SHORT_VAL} --text text --save_every_steps 3 --snapshot_path"
    command = f"{script} {options} s --batch_size 8"
    job = shell.ranks(command, 2)
    position = "--skip_steps 4 (after epoch 0 + 48 samples)"
    job.fails("the gradient of step 4 is nan or inf", f"or skip the batch: {position}")
    assert job.output.count("the gradient of step 4 ") == 2
    slow = float64 + BAD_GRADIENT + read_script("step_clock.py")
    slow = patch(shell.folder, name, slow, "slow.py")
    more = "new --batch_size 8 --save_every_steps 1000 --log_every_steps 1"
    job = shell.ranks(f"{slow} {options} {more}", 2, SECONDS="2 2")
    job.fails("the gradient of step 4 is nan or inf")
    assert "step 5 |" not in job.output  # the ranks do not train on to the end
    command += " --log_every_steps 1 --skip_steps 4 99"
    output = shell.ranks(command, 2).succeeds()
    assert "step 4 skipped" in output and "nan" not in output
    early = f"{command.replace(' s ', ' early ')} --save_every_steps 1 --skip_steps 1 4"
    assert "epoch 0 + 16 samples | loss 0 |" in shell.ranks(early, 2).succeeds()
    words = "--skip_steps [4, 12]: 12 steps are done: name later ones"
    shell.ranks(f"{command} 12 13", 2).fails(words)
    shell.ranks(command, 2, TORCHELASTIC_RESTART_COUNT="1").succeeds()
    script = patch(shell.folder, "gpt/metrics.py", float64 + UNDO_STEP)
    shell.ranks(f"{script} {options} undone.pt --batch_size 16", 1).succeeds()
    models = [load_gpt(shell.folder / path)["model"].values() for path in ("s", "undone.pt")]
    assert max_abs_diff(*models) < 1e-12
