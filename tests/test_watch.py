"""Watch it run: what is recorded is what runs, and the player tells it right."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import run
from test_docs import browser_of, needs_browser, site  # noqa: F401  a fixture

from tools.launch.snapshots import load
from tools.pages.colours import RECORDINGS
from tools.steps import ROOT
from tools.watch.__main__ import record
from tools.watch.series import RUNS, record_file

SAVES = "        if not self.is_main:\n            return\n        snapshot = {"
BATCH = "            self._run_batch(inputs, targets)\n"
SET_EPOCH = "        self.train_loader.sampler.set_epoch(epoch)\n"


def toy(folder, file, *changes):
    """Writes a file with 16 samples, and changed."""
    text = (ROOT / file).read_text()
    for old, new in [("ToyDataset(2048)", "ToyDataset(16)"), *changes]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / Path(file).name).write_text(text)
    return folder / Path(file).name


@pytest.mark.parametrize(
    "file, ranks",
    [
        ("multigpu_torchrun.py", 3),
        *[
            pytest.param(file, ranks, marks=pytest.mark.long)
            for file, ranks in [
                ("singlegpu.py", 1),
                ("multigpu.py", 2),
                ("multinode.py", 1),
                ("preemptible.py", 2),
                ("elastic_ddp.py", 3),
                ("by_hand/zero.py", 2),
                ("by_hand/fsdp.py", 3),
                ("recipes/fsdp.py", 2),
            ]
        ],
    ],
)
def test_recording_changes_nothing(shell, file, ranks):
    script = toy(shell.folder, file)
    command = f"torchrun --standalone --nproc_per_node={ranks} {script} 2 1"
    if file in ("singlegpu.py", "multigpu.py"):
        command = f"{sys.executable} {script} 2 1"
    shell.run(f"{command} --snapshot_path {shell.folder}/plain.pt")
    (shell.folder / "recorded").mkdir()
    recording, output = record(command, script, shell.folder / "recorded")
    assert recording["end"] == "", output
    weights, others = (load(p)["model"] for p in sorted(shell.folder.rglob("*.pt")))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert [len(attempt) for attempt in recording["attempts"]] == [ranks]


def test_collectives(shell):
    """Those of multinode.py, by name, on both ranks."""
    command = f"torchrun --standalone --nproc_per_node=2 {toy(shell.folder, 'multinode.py')} 1 1"
    recording, _ = record(f"{command} --batch_size 4", shell.folder / "multinode.py", shell.folder)
    for events in recording["attempts"][0]:
        assert [collective for _, collective, _ in events if collective] == [
            "init_process_group",
            "all_gather_object",
            "DDP: compare and broadcast the weights",
            "DDP: all-reduce 165 gradients",
            "DDP: agree on buckets",
            "DDP: all-reduce 165 gradients",
            "all_reduce",
        ]


def watch(folder, script):
    """Has the command write a page of a script; returns what it prints."""
    command = [sys.executable, "-m", "tools.watch", "-o", folder / "page.html", script]
    result = run(*command, "2", "1", "--batch_size", "4")
    assert result.returncode == 0, result.stderr
    return result.stdout


def last_step(page):
    slider = page.locator(".watch input")
    slider.fill(slider.get_attribute("max"))
    return page.locator(".says").inner_text()


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize(
    "change, waits",
    [
        (
            (SAVES, SAVES.replace("        snapshot", "        dist.barrier()\n        snapshot")),
            [
                "Rank 0 waits in line 117: barrier.",
                "Rank 1 waits in line 89: DDP: all-reduce 165 g",
            ],
        ),
        (
            (BATCH, f"{BATCH}            if dist.get_rank() == 1:\n                break\n"),
            [
                "Rank 0 waits in line 88: DDP: agree on buckets.",
                "Rank 1 waits in line 108: all_red",
            ],
        ),
    ],
    ids=["a barrier of one rank", "a rank leaves early"],
)
def test_hang(tmp_path, change, waits):
    script = toy(tmp_path, "multinode.py", change)
    assert watch(tmp_path, script).startswith("The run hangs.")
    with browser_of(tmp_path) as (page, address):
        page.goto(f"{address}/page.html")
        said = page.locator(".says").inner_text()  # it opens at its end
    assert all(rank in said for rank in waits)
    assert said.endswith("They do not match: each waits for a call that the other never makes.")


@pytest.mark.long
def test_forgotten_set_epoch(tmp_path):
    """The ranks take the same samples in both epochs."""
    script = toy(tmp_path, "multinode.py", (SET_EPOCH, ""))
    assert watch(tmp_path, script).startswith("The run has ended.")
    page = (tmp_path / "page.html").read_text()
    samples = re.findall(r'"samples": "([\d ]+)"', page)
    assert len(samples) == 8 and samples[:2] == samples[2:4] and samples[4:6] == samples[6:]


# A reader's: all at its top, a model and a loop of its own, which evaluates in between.
OWN = """import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range({steps}):
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(4, 3))
{end}
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "steps, end, printed",
    [
        (3, "dist.destroy_process_group()", "The run has ended. "),
        (10**6, "", "The first 20 steps, or 2,000 lines. "),
        (3, "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_script_of_ones_own(tmp_path, steps, end, printed):
    script = tmp_path / "own.py"
    script.write_text(OWN.format(steps=steps, end=end))
    assert printed in watch(tmp_path, script)
    page = (tmp_path / "page.html").read_text()
    recording = json.loads(re.search('json">(.*?)</script>', page)[1])["own.py"]
    for events in recording["attempts"][0]:
        collectives = [name for _, name, _ in events if name]
        assert collectives.count("DDP: agree on buckets") == 1
        assert collectives.count("DDP: all-reduce 4 gradients") == min(steps, 20)
        assert {line for line, *_ in events} >= {3, *range(6, 13)} and events[0][0] == 3


@needs_browser
def test_player(site):  # noqa: F811  the fixture
    """Each recording plays to its end; a mean of gradients is that of the ranks' own."""
    with browser_of(site) as (page, address):
        page.goto(f"{address}/watch.html?watch=multigpu.py&step=0")
        for _ in range(10):
            if "all-reduce 165" in page.locator(".says").inner_text():
                break
            page.click(".watch button:text('Next collective')")
        own = page.locator(".values tr", has_text="own gradient").locator("td").all_inner_texts()
        page.keyboard.press("ArrowRight")
        row = page.locator(".values tr").filter(has=page.locator("th", has_text="gradient")).last
        mean = row.locator("td").all_inner_texts()
        assert own[0] != own[1] and mean[0] == mean[1]
        assert float(mean[0]) == pytest.approx(sum(map(float, own)) / 2, rel=1e-4)
        for file in RUNS:
            page.select_option(".watch select", file)
            assert "hangs" not in last_step(page)
            assert ("| saved" in page.locator(".log").inner_text()) or file == "preemptible.py"


@pytest.mark.long
@pytest.mark.parametrize("file", RUNS)
def test_recordings_are_as_the_scripts_are(file):
    """The lines and collectives of each rank; make them with python -m tools.watch.series."""
    old = json.loads(RECORDINGS.read_text())[file]
    new, output = record_file(file)

    def places(recording):
        return [
            [[[*at, values.get("weights here")] for *at, values in rank] for rank in ranks]
            for ranks in recording["attempts"]
        ]

    assert old["end"] == new["end"], output
    # How far the other rank comes after a kill depends on the time.
    assert places(old)[-1] == places(new)[-1]
    here = {weights for *_, weights in places(new)[-1][0]}
    assert here >= ({"0", "55", "110"} if file == "by_hand/fsdp.py" else {"165"})
