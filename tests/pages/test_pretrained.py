"""The code of docs/pretrained.md, in multinode.py: who downloads, and what all then have."""

import re
import textwrap

import pytest
import torch
from helpers import LONG, fences, patch, read_script, reference_run
from rankcheck.launch.jobs import TIMEOUT_S

import singlegpu
from tools.launch.snapshots import load
from tools.steps import ROOT

PLACEHOLDER = "https://example.com/toy.pth"  # the address on the page


def start(shell, cache, change=("", "")):
    """Starts four ranks on two nodes, with one `change` to the lines of the page."""
    functions, lines, *_ = fences("pretrained.md", "python")
    functions = functions.replace(PLACEHOLDER, f"file://{shell.folder}/toy.pth")
    source = (ROOT / "multinode.py").read_text()
    for old, new in [
        ("def parse_args", f"{functions}\n\ndef parse_args"),
        ("    model = ToyModel().to(device)\n", textwrap.indent(lines.replace(*change), "    ")),
    ]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (shell.folder / "pretrained.py").write_text(source)
    setup = read_script("meet_while_downloading.py")
    script = patch(shell.folder, shell.folder / "pretrained.py", setup, "started.py")
    nodes = [shell.folder / name for name in ("node1", "node1", "node2", "node2")]
    command = f"{script} 1 1 --snapshot_path {shell.folder}/snapshot.pt"
    return shell.ranks_on(nodes, command, TORCH_HOME=cache)


ALONE = ("download_first(load_weights, local_rank)", "load_weights()")
RANK_0 = ("local_rank", "dist.get_rank()")


@pytest.mark.parametrize(
    ("cache", "change", "downloads"),
    [
        pytest.param("cache", ("", ""), 2, id="one per node"),
        pytest.param("../cache", RANK_0, 1, id="shared disk", marks=LONG),
        pytest.param("../cache", ALONE, 4, id="without it, all at once", marks=LONG),
    ],
)
def test_downloads(shell, cache, change, downloads):
    """As many as documented, and then all ranks have the weights and train from them."""
    weights, _, losses = reference_run(10, 128)
    state_dict = dict(zip(singlegpu.ToyModel().state_dict(), weights, strict=True))
    torch.save(state_dict, shell.folder / "toy.pth")
    output = start(shell, cache, change).succeeds()
    assert output.count("Downloading: ") == downloads
    for rank in range(4):
        loaded = load(shell.folder / f"rank{rank}.pt")
        assert loaded.keys() == state_dict.keys()
        assert all(torch.equal(loaded[name], state_dict[name]) for name in loaded)
    # The loss of its first epoch is below that of the tenth from scratch.
    assert float(re.search(r"epoch 1 \| loss (\S+)", output)[1]) < losses[9]


def test_failed_download_ends_all_ranks(shell):
    """Every rank ends by itself, with status 1 and one line, although only two have the error."""
    job = start(shell, "cache")
    for rank in job.ranks:  # unlike job.wait, which ends the other ranks of a node
        rank.join(TIMEOUT_S)
    assert [rank.exitcode for rank in job.ranks] == [1] * 4, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("cannot download (")]
    assert len(lines) == 4 and set(lines) == {lines[0]}, job.output
    assert "No such file" in lines[0]
    assert lines[0].endswith("): check the address, or download before the job")
    assert "Traceback" not in job.output
