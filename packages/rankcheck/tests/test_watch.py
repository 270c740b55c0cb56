"""rankcheck watch: what each rank does, line by line, in one HTML file."""

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from helpers import by_day, run_rankcheck
from rankcheck.launch.jobs import free_port
from rankcheck.watch.record import record

SCRIPTS = Path(__file__).parent / "scripts"


def watch(folder, script):
    """Has the command write a page of a script; returns what it prints, and the recording."""
    result = run_rankcheck("watch", "-o", folder / "page.html", script, folder=folder)
    assert result.returncode == 0, result.stderr
    page = (folder / "page.html").read_text()
    assert "<style>/*" in page and "src=" not in page  # it opens by itself
    files = json.loads(re.search('json">(.*?)</script>', page)[1])["files"]
    return result.stdout, files[script.name]["attempts"]


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


@pytest.mark.parametrize(
    "steps, end, printed",
    by_day(
        1,
        [
            (10**6, "", "The first 20 steps, or 2,000 lines. "),
            (3, "dist.destroy_process_group()", "The run has ended. "),
            (3, "1 / 0", "ZeroDivisionError: division by zero"),
        ],
    ),
)
def test_script_of_ones_own(tmp_path, steps, end, printed):
    script = tmp_path / "own.py"
    script.write_text(OWN.format(steps=steps, end=end))
    said, attempts = watch(tmp_path, script)
    assert printed in said
    for events in attempts[0]:
        collectives = [name for _, name, _ in events if name]
        assert collectives.count("DDP: agree on buckets") == 1
        assert collectives.count("DDP: all-reduce 4 gradients") == min(steps, 20)
        assert {line for line, *_ in events} >= {3, *range(6, 13)} and events[0][0] == 3


IN_THREAD = """
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
IN_PROCESSES = """
def main():
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="{port}", WORLD_SIZE="2")
    context = mp.get_context("spawn")
    ranks = [context.Process(target=train, args=(rank,)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.parametrize("start", by_day(0, [IN_THREAD, IN_PROCESSES]), ids=["thread", "processes"])
def test_ways_to_start(tmp_path, start):
    """Both ranks are recorded, and what has started them is not. DDP is compiled."""
    body = OWN.format(steps=3, end="dist.destroy_process_group()")
    body = body.replace("torch.nn.parallel", 'torch.compile(backend="eager")(torch.nn.parallel')
    body = body.replace("torch.nn.Linear(3, 1))", "torch.nn.Linear(3, 1)))")
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nimport threading\nimport torch.multiprocessing as mp\n"
        "def train(rank=os.environ.get('RANK')):\n    os.environ['RANK'] = str(rank)\n"
        + textwrap.indent(body, "    ")
        + start.replace("{port}", str(free_port()))
    )
    said, (ranks,) = watch(tmp_path, script)
    assert said.startswith("The run has ended.") and len(ranks) == 2
    for events in ranks:
        assert [name for _, name, *_ in events].count("DDP: all-reduce 4 gradients") == 3


@pytest.mark.long
def test_script_for_gpus_alone(tmp_path):
    """Samples have the numbers that the data set gives them; those of a stream have none."""
    shutil.copy(SCRIPTS / "for_gpus_alone.py", tmp_path / "own.py")
    said, attempts = watch(tmp_path, tmp_path / "own.py")
    assert said.startswith("The run has ended.")
    for events in attempts[0]:
        assert [e[2]["samples"] for e in events if "samples" in e[2]] == ["7 8"]


@pytest.mark.nightly
def test_recording_always_ends(tmp_path, monkeypatch):
    """Also if something else prints for ever."""
    monkeypatch.setattr("rankcheck.watch.record.MAX_WAIT_S", 2)
    script = tmp_path / "own.py"
    script.write_text(
        "import subprocess\nsubprocess.run(['sh', '-c', 'while sleep 0.1; do echo; done'])"
    )
    recording, _ = record(f"python {script}", script, tmp_path)
    assert recording == {"attempts": [], "end": "waits"}
