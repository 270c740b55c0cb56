"""gpt_fsdp.py and gpt_2d.py: the same weights as gpt.py's on one rank, in less memory."""

import re
import shutil
import signal

import pytest
import torch
from helpers import MEASURE_MEMORY, equal_snapshots, load, max_abs_diff, patched
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

SMALL = "--layers 1 --heads 4 --context 8 --steps_per_epoch 20"
GLOBAL_BATCH_SIZE = 8

# Less to evaluate, less to generate.
SHORT = """
script.VAL_CHUNKS = 8
generate = script.GPT.generate
script.GPT.generate = lambda self, prompt, max_new_tokens: generate(self, prompt, 4)
"""

# AdamW turns a gradient that is nearly 0 into a whole step, and so rounding errors into differences
# of 1e-4. In float64 they stay small. As in the sharded scripts, the loss gets float32 logits.
FLOAT64 = """
torch.set_default_dtype(torch.float64)
forward = script.GPT.forward
script.GPT.forward = lambda self, tokens: forward(self, tokens).float()
clip_grad_norm_ = nn.utils.clip_grad_norm_
def clip_and_count(parameters, max_norm):
    norm = clip_grad_norm_(parameters, max_norm)
    print("clipped" if norm > max_norm else "not clipped")
nn.utils.clip_grad_norm_ = clip_and_count
"""


def script(shell, name, setup=FLOAT64):
    path = shell.folder / name
    path.write_text(patched(f"recipes/{name}", SHORT + setup))
    return path


def whole(folder):
    """Returns a snapshot of several ranks as one of whole tensors."""
    path = folder / "whole.pt"
    dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=False)


def train(shell, name, epochs, snapshot, dp_size=1, tp_size=1, options=""):
    """Trains with the same global batch on any number of ranks; returns the output."""
    batch_size = GLOBAL_BATCH_SIZE // dp_size
    options += f" {SMALL} --batch_size {batch_size} --snapshot_path {snapshot}"
    if name == "gpt_2d.py":
        options += f" --tp_size {tp_size}"
    command = f"{script(shell, name)} {epochs} 1 {options}"
    return shell.ranks(command, dp_size * tp_size).succeeds()


def check_equal(snapshot, reference):
    assert snapshot["model"].keys() == reference["model"].keys()
    weights = [snapshot["model"][name] for name in reference["model"]]
    assert max_abs_diff(weights, reference["model"].values()) < 1e-6


def test_sharded_gpt_is_gpt(shell):
    """After 20 steps, some of them with clipped gradients, on one rank and on several."""
    output = train(shell, "gpt.py", 1, "one.pt")
    assert "\nclipped" in output
    reference = load(shell.folder / "one.pt")
    for ranks in (1, 2, 4):
        train(shell, "gpt_fsdp.py", 1, f"fsdp_{ranks}", ranks)
        check_equal(whole(shell.folder / f"fsdp_{ranks}" / "epoch_1"), reference)
    train(shell, "gpt_fsdp.py", 1, "recomputed", 2, options="--recompute")
    check_equal(whole(shell.folder / "recomputed" / "epoch_1"), reference)
    for dp_size, tp_size in [(1, 2), (2, 2), (1, 4)]:
        train(shell, "gpt_2d.py", 1, f"{dp_size}_{tp_size}", dp_size, tp_size)
        check_equal(whole(shell.folder / f"{dp_size}_{tp_size}" / "epoch_1"), reference)


def test_resumed_on_other_ranks(shell):
    """2 x 2 ranks save; 2 ranks resume, with and without tensor parallelism."""
    train(shell, "gpt.py", 2, "one.pt")
    reference = load(shell.folder / "one.pt")
    # The learning rate follows total_epochs: the run of one epoch is one that was stopped.
    stopped = script(shell, "gpt_2d.py", FLOAT64 + STOP_AFTER_ONE_EPOCH)
    shell.ranks(f"{stopped} 2 1 {SMALL} --tp_size 2 --batch_size 4", 4).wait()
    for name, dp_size, tp_size in [("gpt_2d.py", 1, 2), ("gpt_fsdp.py", 2, 1)]:
        shutil.copytree(shell.folder / "snapshot", shell.folder / f"{name}.snapshot")
        output = train(shell, name, 2, f"{name}.snapshot", dp_size, tp_size)
        assert "1 of 2 epochs done" in output
        check_equal(whole(shell.folder / f"{name}.snapshot" / "epoch_2"), reference)


STOP_AFTER_ONE_EPOCH = """
run_epoch = script.Trainer._run_epoch
def run_one_epoch(self, epoch):
    if epoch == 1:
        self._wait_for_save()
        sys.exit("stopped after an epoch")
    run_epoch(self, epoch)
script.Trainer._run_epoch = run_one_epoch
"""

# The save of epoch 4 never ends: it stops before it writes .metadata, the last of its files.
HELD_SAVE = """
from torch.distributed.checkpoint import FileSystemWriter
run_epoch = script.Trainer._run_epoch
def run_and_tell(self, epoch):
    run_epoch(self, epoch)
    print("trained epoch", epoch + 1)
script.Trainer._run_epoch = run_and_tell
finish = FileSystemWriter.finish
def hold_and_finish(self, metadata, results):
    if "epoch_4" in str(self.path):
        print("holding")
        time.sleep(10**6)
    finish(self, metadata, results)
FileSystemWriter.finish = hold_and_finish
"""


def test_killed_while_it_saves(shell):
    """Training goes on meanwhile; a kill leaves the snapshot before, which is resumed exactly."""
    held = script(shell, "gpt_fsdp.py", HELD_SAVE)
    command = "6 2 --layers 1 --heads 1 --steps_per_epoch 4 --batch_size 4 --snapshot_path"
    job = shell.ranks(f"{held} {command} killed", 2)
    job.wait_for("holding")
    job.wait_for("trained epoch 5", times=2)
    assert (shell.folder / "killed" / "epoch_4" / "__0_0.distcp").exists()
    assert not (shell.folder / "killed" / "epoch_4" / ".metadata").exists()
    job.signal(signal.SIGKILL)
    job.wait()
    plain = script(shell, "gpt_fsdp.py", "")
    output = shell.ranks(f"{plain} {command} killed", 2).succeeds()
    assert "2 of 6 epochs done" in output
    shell.ranks(f"{plain} {command} uninterrupted", 2).succeeds()
    one, other = (whole(shell.folder / name / "epoch_6") for name in ("killed", "uninterrupted"))
    assert equal_snapshots(one, other)
    # Only the last snapshot is kept.
    assert [path.name for path in (shell.folder / "killed").iterdir()] == ["epoch_6"]


MEASURE = f"""{MEASURE_MEMORY}
script.Trainer._evaluate = lambda self: 0.0
script.GPT.generate = lambda self, prompt, max_new_tokens: ""
"""
LARGE = "--layers 12 --context 8 --batch_size 1 --steps_per_epoch 1"


def test_memory_of_a_rank(shell):
    """Weights, gradients and optimizer are sharded: measured by the system, at their peak."""
    peak = {}
    for name, ranks in [("gpt.py", 2), ("gpt_fsdp.py", 2), ("gpt_fsdp.py", 4)]:
        command = f"{script(shell, name, MEASURE)} 1 1 {LARGE} --heads 8"
        output = shell.ranks(command, ranks).succeeds()
        peak[name, ranks] = max(map(int, re.findall(r"rank \d took (\d+)", output)))
    assert peak["gpt_fsdp.py", 2] < 0.6 * peak["gpt.py", 2], peak
    assert peak["gpt_fsdp.py", 4] < 0.4 * peak["gpt.py", 2], peak


def test_large_text_is_not_loaded(shell):
    """2 GiB of text take no more memory than 16 MiB; the file is sparse, and takes no disk."""
    peak = {}
    for gibibytes in (1 / 64, 2):
        with open(shell.folder / "text", "wb") as file:
            file.truncate(int(gibibytes * 2**30))
        command = f"{script(shell, 'gpt.py', MEASURE)} 1 1 --layers 1 --heads 1 --text text"
        output = shell.ranks(f"{command} --steps_per_epoch 4 --num_workers 1").succeeds()
        peak[gibibytes] = int(re.search(r"took (\d+)", output)[1])
    assert peak[2] - peak[1 / 64] < 20 * 2**20, peak


LIMIT = """
import resource
def limit(growth):
    with open("/proc/self/status") as file:
        data = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
    hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (data + growth, hard_limit))
GPT = script.GPT
def limited_gpt(*args):
    limit({growth})
    return GPT(*args)
script.GPT = limited_gpt
configure_optimizer = script.configure_optimizer
def started(model, learning_rate):
    print("started")
    sys.exit()
script.configure_optimizer = started
"""


def test_starts_without_memory_for_the_whole_model(shell):
    """A limit on the memory of each of 4 ranks: half of what the weights need."""
    weights_bytes = 4 * 12 * 12 * (12 * 64) ** 2  # of 12 blocks
    setup = LIMIT.format(growth=weights_bytes // 2)
    plain = shell.ranks(f"{script(shell, 'gpt.py', setup)} {LARGE} --heads 12")
    assert plain.wait() != 0 and "can't allocate memory" in plain.output
    sharded = shell.ranks(f"{script(shell, 'gpt_fsdp.py', setup)} {LARGE} --heads 12", 4)
    assert sharded.wait() == 0, sharded.output
    assert sharded.output.count("started") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--heads 3 --tp_size 2", "--tp_size must be 1 or more, and divide both --heads and"),
        ("--heads 3 --tp_size 3 --context 9", "--tp_size 3 does not divide the 2 ranks"),
        ("--tp_size 0", "--tp_size must be 1 or more, and divide"),
    ],
)
def test_bad_tp_size(shell, options, message):
    shell.ranks(f"recipes/gpt_2d.py 1 {options}", 2).fails(message)


def test_snapshot_of_another_layout(shell):
    tiny = "--layers 1 --heads 1 --steps_per_epoch 2"
    shell.ranks(f"recipes/gpt_fsdp.py 1 {tiny} --snapshot_path sharded").succeeds()
    shell.ranks(f"recipes/gpt.py 1 {tiny} --snapshot_path sharded").fails(
        "cannot load sharded (IsADirectoryError(", "): move it or set another --snapshot_path"
    )
    shell.ranks(f"recipes/gpt_fsdp.py 2 {tiny} --layers 2 --snapshot_path sharded", 2).fails(
        "cannot load sharded/epoch_1 (",
        "Missing key in checkpoint",
        "): move it or set another --snapshot_path",
    )
    shell.ranks(f"recipes/gpt.py 1 {tiny}").succeeds()
    shell.ranks(f"recipes/gpt_fsdp.py 1 {tiny} --snapshot_path snapshot.pt").fails(
        "--snapshot_path must be a folder, and snapshot.pt is a file"
    )


def test_snapshots_need_a_shared_disk(shell):
    """Each rank writes its own shards, but only the folder of rank 0 has .metadata."""
    folders = [shell.folder / "a", shell.folder / "b"]
    command = "recipes/gpt_fsdp.py 1 --layers 1 --heads 1 --steps_per_epoch 2"
    shell.ranks_on(folders, command).succeeds()
    shell.ranks_on(folders, command).fails("ranks start at epochs [1, 0]: use a shared disk")


def test_full_disk_in_the_background(shell):
    folders = [shell.folder] * 2
    command = "recipes/gpt_fsdp.py 1 --layers 1 --heads 1 --steps_per_epoch 2 --snapshot_path s"
    job = shell.ranks_on(folders, command, full_disk_folders=folders)
    job.fails("cannot save (", "): disk full, or folder used by another run?")
