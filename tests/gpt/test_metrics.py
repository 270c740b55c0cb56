"""gpt/metrics.py, and those that build on it: what each step logs, and a gradient that is NaN."""

import re
import signal
from textwrap import indent

import pytest
from gpt_helpers import TINY, TINY_CHUNKS, write_tiny_text
from helpers import SHORT_GPT, SHORT_VAL, SIGNAL, curves, fences, long, patch

from tools.launch.snapshots import load, load_gpt, max_abs_diff
from tools.steps import ROOT


def test_logged_steps(shell):
    """Losses are means over all samples, of all ranks; the norm is that of one rank's gradient."""
    write_tiny_text(shell)
    steps = []
    for ranks in (1, 2):
        script = patch(shell.folder, "gpt/metrics.py", SHORT_GPT)
        options = f"1 {TINY} {SHORT_VAL} --text text --batch_size {16 // ranks} --log_every_steps 1"
        output = shell.ranks(f"{script} {options} --snapshot_path {ranks}.pt", ranks).succeeds()
        found = re.findall(
            r"step (\d+) \| loss (\S+) \| grad norm (\S+) \| lr (\S+)$", output, re.M
        )
        steps.append([[float(value) for value in step] for step in found])
    assert steps[1] == [pytest.approx(step, rel=2e-3) for step in steps[0]]
    numbers, losses, *_ = zip(*steps[1], strict=True)
    assert numbers == (*range(1, 13),)
    total = sum(loss * min(16, TINY_CHUNKS - 16 * step) for step, loss in enumerate(losses))
    assert load(shell.folder / "2.pt")["loss"] == pytest.approx(total / TINY_CHUNKS, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt/metrics.py", *long("gpt/fsdp.py")])
def test_tensorboard(shell, name):
    """The lines of the page, in their places: a run that is killed and resumed has one curve."""
    write_tiny_text(shell)
    (shown,) = fences("gpt/metrics.md", "python")
    imported, at_start, at_end = re.split(r"\n# in .*:\n", shown)
    source = (ROOT / name).read_text()
    source = source.replace("import torch\n", f"import torch\n{imported}\n", 1)
    for line, added in [
        (r"(?=\n    def _request_stop\()", at_start),
        (r'        self\._log\(f"step .* \| {numbers}.*\n', at_end),
    ]:
        source, count = re.subn(line, rf"\g<0>{indent(added.strip(), ' ' * 8)}\n", source)
        assert count == 1
    own = shell.folder / "own.py"
    own.write_text(source)
    script = patch(shell.folder, own, SHORT_GPT + SIGNAL, "patched.py")
    command = f"{script} 1 {TINY} {SHORT_VAL} --text text --batch_size 8 --log_every_steps 2"
    kill = {"SIGNAL": str(int(signal.SIGKILL)), "SIGNAL_AT": f"0 {7 * 16}"}
    assert shell.ranks(f"{command} --save_every_steps 3", 2, **kill).wait() != 0
    output = shell.ranks(command, 2).succeeds()
    assert "step 8 " in output
    (logs,) = shell.folder.glob("snapshot*.logs")
    assert [step for step, _ in curves(logs)["loss"]] == [2, 4, 6, 8, 10, 12]


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
    if self.samples_run == 64:
        self.model.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(self.before[1])
"""


@pytest.mark.parametrize("name", ["gpt/metrics.py", "gpt/fsdp.py"])
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
    job = shell.ranks(f"{script} {options} new --batch_size 8 --save_every_steps 1000", 2)
    job.fails("the gradient of step 4 is nan or inf")
    assert "val loss" not in job.output  # the ranks do not train on to the end
    command += " --skip_steps 4 99"
    output = shell.ranks(command, 2).succeeds()
    assert "step 4 skipped" in output and "nan" not in output
    shell.ranks(command, 2).fails("--skip_steps [4]: 12 steps are done: name later ones")
    shell.ranks(command, 2, TORCHELASTIC_RESTART_COUNT="1").succeeds()
    script = patch(shell.folder, "gpt/metrics.py", float64 + UNDO_STEP)
    shell.ranks(f"{script} {options} undone.pt --batch_size 16", 1).succeeds()
    models = [load_gpt(shell.folder / path)["model"].values() for path in ("s", "undone.pt")]
    assert max_abs_diff(*models) < 1e-12
