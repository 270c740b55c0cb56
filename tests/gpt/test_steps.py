"""gpt/metrics.py, skip_steps.py and slow_network.py: what a step logs; gradients that are not used.

Those are of NaN, or in float16.
"""

import re
import signal
from textwrap import indent

import pytest
from gpt_helpers import FLOAT64, TINY, TINY_BATCH, TINY_CHUNKS, write_tiny_text
from helpers import (
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    curves,
    fences,
    first,
    long,
    patch,
    read_script,
    weights_diff,
)
from rankcheck.launch.jobs import pretend_gpus

from tools.launch.snapshots import load
from tools.steps import ROOT

OPTIONS = f"1 {TINY} {SHORT_VAL} --text text"


def tiny_script(shell, name, setup="", file="", chunks=TINY_CHUNKS):
    """Returns the command of a script that trains an epoch on a text of so many chunks."""
    write_tiny_text(shell, chunks=chunks)
    return f"{patch(shell.folder, name, SHORT_GPT + setup, file)} {OPTIONS}"


def test_logged_steps(shell):
    """Losses are means over all samples, of all ranks; the norm is that of one rank's gradient."""
    script = tiny_script(shell, "gpt/metrics.py")
    steps = []
    for ranks in (1, 2):
        options = f"--batch_size {TINY_BATCH // ranks} --log_every_steps 1"
        gpus = pretend_gpus(1) if ranks == 1 else {}
        job = shell.ranks(f"{script} {options} --snapshot_path {ranks}.pt", ranks, **gpus)
        output = job.succeeds()
        assert output.count(" | peak memory 0.0 GiB") == (12 if gpus else 0)
        found = re.findall(r"step (\d+) \| loss (\S+) \| grad norm (\S+) \| lr (\S+) \|", output)
        steps.append([[float(value) for value in step] for step in found])
    assert steps[1] == [pytest.approx(step, rel=2e-3) for step in steps[0]]
    numbers, losses, *_ = zip(*steps[1], strict=True)
    assert numbers == (*range(1, 13),)
    total = sum(loss * min(16, TINY_CHUNKS - 16 * step) for step, loss in enumerate(losses))
    assert load(shell.folder / "2.pt")["loss"] == pytest.approx(total / TINY_CHUNKS, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt/metrics.py", *long("gpt/fsdp.py")])
def test_tensorboard(shell, name):
    """The lines of the page, in their places: a run that is killed and resumed has one curve."""
    (shown,) = fences("gpt/evaluate.md", "python")
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
    script = tiny_script(shell, own, SIGNAL, "patched.py")
    command = f"{script} --batch_size 8 --log_every_steps 2"
    kill = {"SIGNAL": str(int(signal.SIGKILL)), "SIGNAL_AT": f"0 {7 * TINY_BATCH}"}
    assert shell.ranks(f"{command} --save_every_steps 3", 2, **kill).wait() != 0
    assert "step 8 " in shell.ranks(command, 2).succeeds()
    (logs,) = shell.folder.glob("snapshot*.logs")
    assert [step for step, _ in curves(logs)["loss"]] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("name", first(1, ["gpt/skip_steps.py", "gpt/fsdp.py"]))
def test_gradient_that_is_nan(shell, name):
    """All ranks end, and say of which step it was; --skip_steps goes past it."""
    chunks = 6 * TINY_BATCH
    setup = FLOAT64 + read_script("bad_gradient.py")
    script = tiny_script(shell, name, SIGNAL + setup, chunks=chunks)
    command = f"{script} --batch_size 8 --save_every_steps 3 --snapshot_path"
    job = shell.ranks(f"{command} s", 2)
    position = "--skip_steps 4 (after epoch 0 + 48 samples)"
    job.fails("the gradient of step 4 is nan or inf", f"or skip the batch: {position}")
    assert job.output.count("the gradient of step 4 ") == 2
    slow = tiny_script(shell, name, setup + read_script("step_clock.py"), "slow.py", chunks)
    options = "--batch_size 8 --save_every_steps 1000 --log_every_steps 1"
    job = shell.ranks(f"{slow} {options} --snapshot_path new", 2, SECONDS="2 2")
    job.fails("the gradient of step 4 is nan or inf")
    assert "step 5 |" not in job.output  # the ranks do not train on to the end
    skip = "--log_every_steps 1 --skip_steps"
    output = shell.ranks(f"{command} s {skip} 4 99", 2).succeeds()
    assert "step 4 skipped" in output and "nan" not in output
    output = shell.ranks(f"{command} early {skip} 1 4 --save_every_steps 1", 2).succeeds()
    assert "epoch 0 + 16 samples | loss 0 |" in output
    words = "--skip_steps [4, 6]: 6 steps are done: name later ones"
    shell.ranks(f"{command} s {skip} 4 99 6 7", 2).fails(words)
    shell.ranks(f"{command} s {skip} 4 99", 2, TORCHELASTIC_RESTART_COUNT="1").succeeds()
    undo = tiny_script(
        shell, "gpt/metrics.py", FLOAT64 + read_script("undo_step.py"), chunks=chunks
    )
    shell.ranks(f"{undo} --batch_size 16 --snapshot_path undone.pt", 1).succeeds()
    assert weights_diff(shell, "s", "undone.pt") < 1e-12


def test_slow_network_is_close(shell):
    """float16 gradients change the weights, a little; the size of the buckets changes nothing."""
    bucket_size = "lambda self: print(self.model.bucket_bytes_cap)"
    setup = f"{PLAIN_SGD}after(script.Trainer, 'train')({bucket_size})"
    for path, name, option in [
        ("plain", "gpt/pretrain.py", ""),
        ("uncompressed", "gpt/slow_network.py", "--bucket_cap_mb 1"),
        ("compressed", "gpt/slow_network.py", "--compress"),
    ]:
        options = f"--batch_size 8 --learning_rate 0.1 {option} --snapshot_path {path}"
        output = shell.ranks(f"{tiny_script(shell, name, setup)} {options}", 2).succeeds()
        assert (f"\n{2**20}\n" in output) == ("--bucket_cap_mb 1" in option)
    assert weights_diff(shell, "uncompressed", "plain") == 0
    assert 0 < weights_diff(shell, "compressed", "plain") < 1e-3


def test_gradient_beyond_float16(shell):
    """The run stops before the step that would make every weight NaN."""
    large_loss = "loss = script.next_byte_loss\nscript.next_byte_loss = lambda *x: 1e9 * loss(*x)"
    script = tiny_script(shell, "gpt/slow_network.py", large_loss)
    job = shell.ranks(f"{script} --batch_size 8 --compress", 2)
    job.fails("the gradient of step 1 is nan or inf")
    assert not (shell.folder / "snapshot.pt").exists()
