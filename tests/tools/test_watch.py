"""The recordings of docs/watch.md: they are what the scripts do, and the player tells it right."""

import json
import re

import pytest
import torch
from browser import browser_of
from helpers import first, load_state, patch, read_script, resize, run

from tools.steps import ROOT
from tools.watch.recordings import RECORDINGS
from tools.watch.series import RUNS, record_file

RECORD = """
from rankcheck.watch import recorder
recorder.install()
"""


def test_recording_changes_nothing(shell):
    """The weights are the same, bit for bit, and so is the order of the collectives."""
    folders = [shell.folder / name for name in ("plain", "recorded")]
    file = ROOT / "recipes" / "fsdp.py"
    for folder, setup in zip(folders, (read_script("log_operations.py"), RECORD), strict=True):
        (folder / "events").mkdir(parents=True)
        script = patch(folder, "recipes/fsdp.py", resize(16) + setup)
        variables = {"WATCH_FOLDER": str(folder / "events"), "WATCH_FILE": str(file)}
        shell.ranks_on([folder] * 2, f"{script} 2 1 --batch_size 4", **variables).succeeds()
    plain, recorded = (load_state(folder, "model") for folder in folders)
    assert all(torch.equal(plain[name], recorded[name]) for name in plain | recorded)
    operations = {}
    for path in folders[1].rglob("*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        rank = next(event[2]["rank"] for event in events if "rank" in event[2])
        operations[rank] = [event[4] for event in events if event[4]]
    logs = {path.name[0]: json.loads(path.read_text()) for path in folders[0].glob("*.log.json")}
    assert operations == logs and len(logs) == 2


@pytest.mark.long
def test_hang(tmp_path):
    """The end of the page says which rank waits in which line, and for what."""
    batch = "            self._run_batch(inputs, targets)\n"
    text = (ROOT / "multinode.py").read_text().replace("ToyDataset(2048)", "ToyDataset(16)")
    sleep = "            if dist.get_rank() == 1:\n                time.sleep(9999)\n"
    assert text.count(batch) == 1
    script = tmp_path / "multinode.py"
    script.write_text(text.replace(batch, batch + sleep))
    command = ["rankcheck", "watch", "-o", tmp_path / "page.html", script]
    result = run(*command, "2", "1", "--batch_size", "4")
    assert result.stdout.startswith("The run hangs."), result.stdout + result.stderr
    with browser_of(tmp_path) as (page, address):
        page.goto(f"{address}/page.html")
        said = page.locator(".says").inner_text()  # it opens at its end
    lines = script.read_text().splitlines()
    backward, sleeping = (
        next(number for number, line in enumerate(lines, 1) if line.strip().startswith(start))
        for start in ("loss = self.", "time.sleep(9999)")
    )
    assert said == (
        f"Rank 0 waits in line {backward}: DDP: agree on buckets. "
        f"Rank 1 waits in line {sleeping}: a call that does not return. "
        "They do not match: each waits for a call that the other never makes."
    )


def go_to(page, collective):
    """Presses "Next collective" until the player names one."""
    for _ in range(30):
        if collective in page.locator(".watch .says").inner_text():
            return
        page.click(".watch button:text('Next collective')")
    raise AssertionError(f"no {collective}")


@pytest.mark.long
def test_player(site):
    """Each recording plays to its end; a mean of gradients is that of the ranks' own."""
    with browser_of(site) as (page, address):
        page.goto(f"{address}/watch.html")
        assert page.locator(".watch select").input_value() == "multigpu.py"
        go_to(page, "All ranks are in a collective: DDP: all-reduce 165 gradients.")
        own = page.locator(".values tr", has_text="own gradient").locator("td").all_inner_texts()
        page.keyboard.press("ArrowRight")
        row = page.locator(".values tr").filter(has=page.locator("th", has_text="gradient")).last
        mean = row.locator("td").all_inner_texts()
        assert own[0] != own[1] and mean[0] == mean[1]
        assert float(mean[0]) == pytest.approx(sum(map(float, own)) / 2, rel=1e-4)
        for file, recording in json.loads(RECORDINGS.read_text()).items():
            page.select_option(".watch select", file)
            slider = page.locator(".watch input")
            slider.fill(slider.get_attribute("max"))
            said = page.locator(".says").inner_text()
            assert said.endswith(" failed." if recording["end"] else "The run has ended."), file
            assert ("They do not match" in said) == ("fault" in file)
            events = [event for rank in recording["attempts"][-1] for event in rank]
            log = "".join(values.get("log", "") for _, _, values, *_ in events)
            assert page.locator(".log").text_content() == log
        page.goto(f"{address}/gpt/hsdp.html")  # here it is folded, and made when it is unfolded
        assert page.locator(".watch .line").count() == 0
        page.click("summary:text('Watch it run')")
        assert "FSDP: all-reduce" in page.locator(".says").inner_text()
        go_to(page, "Ranks 0, 2 are in a collective: FSDP: all-reduce")
        table = page.locator(".values")  # where all four are in sight
        assert table.evaluate("table => table.scrollWidth <= table.clientWidth")


HELD = {  # by each of two ranks at some time: weights of the model, and of the optimizer's state
    "by_hand/ddp.py": ({"165"}, {"165"}),
    "by_hand/zero.py": ({"165"}, {"83"}),
    "by_hand/fsdp.py": ({"0", "5", "10", "50", "55", "100", "110"}, {"83"}),
}


def comparable(event):
    """Returns an event without its time, and without the size of what Python has pickled."""
    line, name, _, *more = event
    return [line, re.sub(r": gather [\d,]+", ": gather", name or ""), *more]


@pytest.mark.long
@pytest.mark.parametrize("file", first(8, [*RUNS]))
def test_recordings_are_as_the_scripts_are(file):
    """The lines, collectives and log of each rank; make them with python -m tools.watch.series."""
    old = json.loads(RECORDINGS.read_text())[file]
    new, output = record_file(file)
    assert old["end"] == new["end"], output
    # How far the other rank comes after a kill depends on the time.
    ranks = new["attempts"][-1]
    for before, events in zip(old["attempts"][-1], ranks, strict=True):
        size = min(len(before), len(events)) if new["end"] == "fails" else None
        assert [*map(comparable, before[:size])] == [*map(comparable, events[:size])]
    values = [event[2] for attempt in new["attempts"] for rank in attempt for event in rank]
    logged = "".join(found.get("log", "") for found in values).splitlines()
    printed = re.findall(r"^(?:epoch|rank|\d+ of|\S+ tokens(?:/s)?|val loss) .*", output, re.M)
    assert sorted(logged) == sorted(printed)
    if file in HELD:
        names = ("weights here", "optimizer state here")
        assert tuple({v[name] for v in values if name in v} for name in names) == HELD[file]
