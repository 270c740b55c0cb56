"""What is a rank's own: its group's options, its random numbers, its bar, its last snapshot."""

import re
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import LONG, NAMES, SCRIPTS, SIGNAL, first, module, patch, read_script
from rankcheck.launch.jobs import pretend_gpus

from tools.compose.compose import ancestors
from tools.launch.snapshots import equal_snapshots, load


@pytest.mark.parametrize("name", [name for name in NAMES if name != "singlegpu.py"])
def test_group_on_gpus(name, monkeypatch):
    """It is NCCL's, bound to the rank's own GPU, and has the timeout that the user has set."""
    init_process_group = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for variable, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    args = SimpleNamespace(timeout=3)
    with pytest.raises(KeyboardInterrupt):
        module(name).main(*([1, args] if name == "multigpu.py" else [args]))
    expected = {"device_id": torch.device("cuda", 1)}
    backend = "nccl"
    if "elastic_ddp.py" in ancestors(name):
        expected["timeout"] = timedelta(seconds=3)
    if name in ("recipes/own_disks.py", "recipes/save_after_failure.py"):
        backend = "cpu:gloo,cuda:nccl"
    init_process_group.assert_called_with(backend, **expected)


@pytest.mark.parametrize("name", first(2, SCRIPTS[:0:-1], LONG))
def test_seeds_and_bar(shell, name):
    """Augmentation and dropout differ between ranks, and can be repeated; rank 0 has the bar."""
    script = patch(shell.folder, name, read_script("tell_seeds.py"))
    option = "--global_batch_size 1024" if name == "elastic_ddp.py" else "--batch_size 512"
    ranks = shell.ranks(f"{script} 2 {option}", 2, **pretend_gpus(2))
    output = ranks.succeeds()
    seeds = {"reads": [0, 2], "trains": [0, 2]}  # of rank 0, in two epochs
    if name in SCRIPTS[4:]:  # these can resume at any step
        seeds = {"reads": [0, 2, 2048], "trains": [0, 1024, 2048, 3072]}
    for rank in range(2):
        for action in seeds:
            found = re.findall(rf"rank {rank} {action} with seed (\d+)", output)
            assert {int(seed) for seed in found} == {seed + rank for seed in seeds[action]}
    assert "bar of rank 0" in output and "bar of rank 1" not in output


@pytest.mark.parametrize(("gpus", "killed", "saved"), [(0, 1, True), (0, 0, False), (2, 1, False)])
def test_save_after_failure(shell, gpus, killed, saved):
    """Of the ranks of a node, 0 saves; none does after an error of NCCL."""
    script = patch(shell.folder, "recipes/save_after_failure.py", SIGNAL)
    kill = {"SIGNAL": "9", "SIGNAL_AT": "0 320", "SIGNAL_RANK": str(killed)}
    if gpus > 0:
        kill |= pretend_gpus(gpus)
    job = shell.ranks(f"{script} 1", 2, **kill)
    job.wait()
    assert all(rank.exitcode for rank in job.ranks)
    assert (shell.folder / "snapshot.pt").exists() == saved


def test_each_node_has_the_last_snapshot(shell):
    """Also one that failed while it saved: the next start, which trains nothing, saves it there."""
    paths = [shell.folder / node / "snapshot.pt" for node in ("a", "b")]
    for _ in range(2):
        shell.ranks_on([path.parent for path in paths], "recipes/own_disks.py 1").succeeds()
        assert equal_snapshots(*map(load, paths))
        paths[1].unlink()
