"""gpt/gpt.py, and snapshots of files that save as it does: where one stopped, it resumes."""

import importlib
import re
import signal

import pytest
import torch
from gpt_helpers import TINY_BATCH, TINY_CHUNKS, tiny_options, write_tokens
from helpers import (
    LOG_LOSSES,
    SHORT_GPT,
    SIGNAL,
    VAL_CHUNKS,
    assert_equal,
    gpt_config,
    logged_losses,
    long,
    patch,
)

from tools.launch.snapshots import load_gpt

# Of the others, tests/faults/every_kill.py and the judge prove the ways to stop and resume.
WITH_SNAPSHOTS_OF_THEIR_OWN = ["gpt/gpt.py", *long("gpt/local_sgd.py", "gpt/dcp.py")]
# Tells whether a snapshot's weights are still in its file when the model takes them.
PRINT_MAPPED = """
@before(script.GPT, "load_state_dict")
def print_mapped(self, state):
    print("mapped:", "/resumed" in script.Path("/proc/self/maps").read_text())
"""


@pytest.mark.parametrize("name", WITH_SNAPSHOTS_OF_THEIR_OWN)
def test_killed_and_stopped_is_uninterrupted(shell, name):
    """Two ranks, killed in mid-epoch, then stopped in mid-epoch, end as two that are left alone.

    Bit for bit; and each snapshot has the same loss, to 1e-6: it adds the same numbers otherwise.
    """
    script = patch(shell.folder, name, SHORT_GPT + LOG_LOSSES + SIGNAL + PRINT_MAPPED)
    command = f"{script} 2 1 --save_every_steps {{}} {tiny_options(shell, name)}/{{}}"
    nodes = ("node1", "node2") if name == "gpt/local_sgd.py" else ("node", "node")
    nodes = [shell.folder / node for node in nodes]
    uninterrupted = shell.ranks_on(nodes, command.format(5, "uninterrupted"))

    kill = {"SIGNAL": str(int(signal.SIGKILL)), "SIGNAL_AT": f"0 {11 * TINY_BATCH}"}
    killed = shell.ranks_on(nodes, command.format(5, "resumed"), **kill)
    assert killed.wait() == -signal.SIGKILL
    saved = load_gpt(shell.folder / "resumed")["samples_run"]
    assert saved in (5 * TINY_BATCH, 10 * TINY_BATCH)

    stop = {"SIGNAL": str(int(signal.SIGHUP)), "SIGNAL_AT": f"1 {2 * TINY_BATCH}"}
    stopped = shell.ranks_on(nodes, command.format(1000, "resumed"), **stop)
    stopped.fails("stopped by a signal")
    samples = saved - 2 * TINY_BATCH  # at the tenth step; an epoch has twelve
    assert f"epoch 1 + {samples} samples | " in stopped.output
    snapshot = load_gpt(shell.folder / "resumed")
    assert (snapshot["epochs_run"], snapshot["samples_run"]) == (1, samples)

    resumed = shell.ranks_on(nodes, command.format(1000, "resumed"))
    assert "1 of 2 epochs done" in resumed.succeeds()
    assert resumed.output.count("mapped: True") == (2 if name == "gpt/gpt.py" else 0)
    losses = logged_losses(uninterrupted.succeeds())
    for output in (killed.output, stopped.output, resumed.output):
        found = logged_losses(output)
        assert found == pytest.approx({at: losses[at] for at in found}, rel=1e-6)
    assert load_gpt(shell.folder / "resumed")["epochs_run"] == 2
    assert_equal(shell.folder / "uninterrupted", shell.folder / "resumed")


@pytest.mark.parametrize("name", ["gpt/gpt.py", "gpt/dcp.py"])
def test_snapshot_of_another_shape(shell, name):
    """Other heads have weights of the same sizes, and DCP would load only the first layers."""
    command = f"{patch(shell.folder, name, SHORT_GPT)} 1 {tiny_options(shell, name)}/s --n_layer 2"
    shell.ranks(command).succeeds()
    for option, size in [("--n_layer", 1), ("--n_head", 4), ("--context", 4)]:
        job = shell.ranks(f"{command} {option} {size}")
        job.fails("cannot load ", ": move it or set another --snapshot_path")
        saved, other = re.search(r"saved by a model of (.*), not (.*)'", job.output).groups()
        assert saved == "n_layer=2, n_head=2, n_embd=16, context=8"
        sizes = re.sub(rf"{option[2:]}=\d", f"{option[2:]}={size}", saved)
        assert other == sizes


def test_text_is_not_loaded(tmp_path):
    """It is read chunk by chunk; this file is sparse, and takes no disk."""
    with open(tmp_path / "text", "wb") as file:
        file.truncate(2**40)
    dataset = importlib.import_module("gpt.gpt").TextDataset(tmp_path / "text", 64)
    assert [chunk.tolist() for chunk in dataset[2**33]] == [[0] * 64] * 2


@pytest.mark.parametrize("name", ["gpt/gpt.py", "gpt/tokens.py"])
def test_generated_text_is_printable(shell, name):
    """No control character reaches the terminal, or makes a log binary."""
    setup = "script.GPT.generate = lambda *arguments: 'gr\\x1b[2Jün\\0\\r\\n\ufffd\\x9b\\u202e!'"
    options = tiny_options(shell, name)
    if name == "gpt/tokens.py":
        write_tokens(shell.folder / "tokens", TINY_CHUNKS + VAL_CHUNKS, 8)
        options = options.replace(f"--text {shell.folder}/text", f"--data {shell.folder}/tokens")
    script = patch(shell.folder, name, setup)
    output = shell.ranks(f"{script} 1 {options}/s --generate 4", 2).succeeds()
    assert output.endswith("\ngr[2Jün\n\ufffd!\n")


@pytest.mark.parametrize("name", ["gpt", "pretrain"])
def test_gpt_sees_no_byte_ahead(name):
    model = importlib.import_module(f"gpt.{name}").GPT(gpt_config(2, 2, 32, 16))
    model.init_weights(seed=0)
    text = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[0, 9:] = 0
    with torch.no_grad():
        difference = (model(text) - model(other)).abs().amax(2)[0]
    assert (difference[:9] < 1e-6).all() and (difference[9:] > 1e-3).all()
