"""gpt/pretrain.py and evaluate.py: a model that learns a song, and evaluations that fail."""

import importlib
import re

import pytest
import torch
from gpt_helpers import tiny_options
from helpers import CLOCK, SHORT_GPT, gpt_config, long, patch, read_script
from torch.nn import functional

from tools.launch.snapshots import load, load_gpt


@pytest.mark.parametrize("name", long("gpt/evaluate.py", "gpt/async_save.py"))
def test_evaluation_that_fails(shell, name):
    """The save comes first, so that no step is lost; the evaluation comes again at the start."""
    script = patch(shell.folder, name, SHORT_GPT + read_script("fail_to_evaluate.py"))
    options = tiny_options(shell, name)
    command = f"{script} 1 1 --save_every_steps 5 --eval_every_steps 5 {options}"
    val_losses = []
    for run, fail_at in [("whole", ""), ("s", "0 80"), ("s", "1 0"), ("s", "")]:
        job = shell.ranks(f"{command}/{run}", 2, FAIL_AT=fail_at)
        assert (job.wait() != 0) == bool(fail_at), job.output
        val_losses.append(re.findall(r"val loss (\S+)", job.output))
        saved = load_gpt(shell.folder / run)
        assert f"{saved['epochs_run']} {saved['samples_run']}" == (fail_at or "1 0")
    assert "nothing left to train" in job.output
    assert job.output.count("1,456 tokens to train on, 96 to validate on, 1 in neither") == 1
    whole, *rest = val_losses
    assert len(set(whole)) == 3 and rest == [whole[:1], whole, whole[2:]]


def test_snapshot_of_an_earlier_step(shell):
    """A val text that was trained on is named; with other optimizer groups, the snapshot stays."""
    options = {name: tiny_options(shell, name) for name in ("gpt/gpt.py", "gpt/evaluate.py")}
    options["gpt/schedule.py"] = options["gpt/evaluate.py"]  # which has written the same text

    def start(name, more=""):
        script = patch(shell.folder, name, SHORT_GPT)
        return shell.ranks(f"{script} 1 1 {options[name]}/s {more}")

    output = start("gpt/gpt.py").succeeds()
    assert "trained on" not in output
    output = start("gpt/evaluate.py").succeeds()
    assert "trained on seed 0, 194 samples of files " in output
    assert ", now seed 0, 182 samples of files " in output
    start("gpt/schedule.py").fails("a different number of parameter groups")


SONG = "nine green bottles hanging on the wall\n"


@pytest.mark.parametrize("name", long("gpt/metrics.py", "gpt/pretrain.py"))
def test_pretrained_gpt(shell, name):
    """On 2 ranks: it learns the song, and its val loss, throughput and MFU are as computed here.

    Finished, it evaluates another text.
    """
    (shell.folder / "song.txt").write_text(SONG * 1451)
    script = patch(shell.folder, name, CLOCK)
    options = "--n_layer 1 --n_head 1 --n_embd 64 --context 32 --text song.txt --val_tokens 8192"
    options += " --batch_size 8 --learning_rate 1e-2 --peak_tflops 0.001"
    options += " --save_every_steps 40 --eval_every_steps 50"
    output = shell.ranks(f"{script} 1 {options}", 2).succeeds()
    assert "48,384 tokens to train on, 8,192 to validate on, 13 in neither" in output
    val_losses = [float(loss) for loss in re.findall(r"val loss (\S+)", output)]
    assert len(val_losses) == 2 and val_losses[-1] < 0.5
    assert "bottles" in output.rpartition("MFU")[2]
    # The speeds of ten steps each; and of all 95, with three snapshots and two evaluations.
    *speeds, overall = [float(s.replace(",", "")) for s in re.findall(r"(\S+) tokens/s", output)]
    seconds = [sum(range(n, n + 10)) / 1000 for n in range(1, 91, 10)]
    assert speeds == pytest.approx([512 * 10 / s for s in seconds], rel=1e-3)
    assert overall == pytest.approx(512 * 94.5 / (95 * 96 / 2000 + 5), rel=1e-3)
    model = importlib.import_module("gpt.pretrain").GPT(gpt_config(1, 1, 64, 32))
    mfu = speeds[-1] * model.flops_per_token / 2 / 0.001e12
    found = re.findall(r"MFU (\S+)%", output)[-2]
    assert float(found) / 100 == pytest.approx(mfu, abs=1e-3)
    model.load_state_dict(load(shell.folder / "snapshot.pt")["model"])
    (shell.folder / "other.txt").write_text(SONG.replace("nine", "ten") * 2370)
    (shell.folder / "short.txt").write_text(SONG[:20])
    output = shell.ranks(f"{script} 1 {options} --text other.txt short.txt", 2).succeeds()
    assert "85,952 tokens to train on, 4,096 to validate on, 32 in neither" in output
    val_losses += [float(re.search(r"val loss (\S+)", output)[1])]
    # The last snapshot's loss on the last chunks of 32 bytes, computed here.
    for name, size, val_loss in [("song", 256, val_losses[1]), ("other", 128, val_losses[2])]:
        text = torch.tensor(list((shell.folder / f"{name}.txt").read_bytes()))
        end = (len(text) - 1) // 32 * 32
        start = end - size * 32
        chunks = text[start:end].view(size, 32), text[start + 1 : end + 1].view(size, 32)
        with torch.no_grad():
            loss = functional.cross_entropy(model(chunks[0]).flatten(0, 1), chunks[1].flatten())
        assert val_loss == pytest.approx(loss.item(), rel=1e-3)
