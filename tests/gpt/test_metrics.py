"""gpt/metrics.py, and those that build on it: what each step logs."""

import re
import signal
from textwrap import indent

import pytest
from gpt_helpers import TINY, TINY_CHUNKS, write_tiny_text
from helpers import SHORT_GPT, SHORT_VAL, SIGNAL, curves, fences, long, patch
from rankcheck.launch.jobs import pretend_gpus

from tools.launch.snapshots import load
from tools.steps import ROOT


def test_logged_steps(shell):
    """Losses are means over all samples, of all ranks; the norm is that of one rank's gradient."""
    write_tiny_text(shell)
    steps = []
    for ranks in (1, 2):
        script = patch(shell.folder, "gpt/metrics.py", SHORT_GPT)
        options = f"1 {TINY} {SHORT_VAL} --text text --batch_size {16 // ranks} --log_every_steps 1"
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
