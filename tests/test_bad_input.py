"""What beginners do: each mistake gets one clear line, a non-zero exit, and nothing is lost."""

import argparse
import importlib
import os
import re
import socket
import stat
import sys

import pytest
import torch
from helpers import SCRIPTS, SHORT_GPT, SHORT_VAL, VAL_CHUNKS, documented_error, patch, run
from test_gpt import TINY

import singlegpu
from tools import steps
from tools.launch.jobs import pretend_gpus
from tools.launch.snapshots import load, write_text
from tools.steps import ROOT

RECIPES = [step.file for step in steps.RECIPES + steps.BY_HAND + steps.GPT]
TP_SIZE = "--tp_size must be 1 or more, and divide both --n_head and --context"
N_KV_HEAD = "--n_kv_head must divide --n_head, and --n_embd / --n_head be even"
LIMITS = "epochs and batch size must be 1 or more, --num_workers 0 or more"


def module(script):
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize("script", SCRIPTS + RECIPES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("0", LIMITS),
        ("50 0", LIMITS),
        ("-3", LIMITS),
        ("fifty", "argument total_epochs: invalid int value: 'fifty'"),
        ("5 5 --num_workers -1", LIMITS),
        ("5 5 --seed x", "argument --seed: invalid int value: 'x'"),
        ("5 5 5", "unrecognized arguments: 5"),
        (
            "--snapshot_path no/such/s.pt",
            "cannot write no/such/s.pt: create its folder, or set another path",
        ),
    ],
)
def test_arguments(script, arguments, message, monkeypatch, capsys):
    assert_refused(script, arguments, message, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("gpt/gpt.py", "--text missing.txt", "cannot read --text missing.txt"),
        ("gpt/gpt.py", "--n_head 3", "and --n_head divide --n_embd"),
        ("gpt/llama.py", "--n_kv_head 3", N_KV_HEAD),
        ("gpt/llama.py", "--n_head 2 --n_embd 6", N_KV_HEAD),
        ("gpt/chunked_loss.py", "--loss_chunks 5", "must be 1 or more, and divide --context"),
        ("gpt/schedule.py", "--val_tokens 63", "--val_tokens at least --context"),
        ("gpt/tensor_parallel.py", "--tp_size 0", TP_SIZE),
        ("gpt/tensor_parallel.py", "--tp_size 4", TP_SIZE),
        ("gpt/tensor_parallel.py", "--context 9 --tp_size 2", TP_SIZE),
        ("gpt/context_parallel.py", "--cp_size 4", TP_SIZE.replace("tp", "cp")),
        ("gpt/context_parallel.py", "--context 9 --cp_size 2", TP_SIZE.replace("tp", "cp")),
        ("gpt/pipeline_parallel.py", "--pp_size 5", "at most --n_layer and --micro_batches"),
        ("gpt/pipeline_parallel.py", "--micro_batches 0", "at most --n_layer and --micro_batches"),
        (
            "gpt/pipeline_parallel.py",
            "--micro_batches 5",
            "--micro_batches must divide --batch_size",
        ),
        ("gpt/pipeline_parallel.py", "--generate 1", "must be 0: no rank has all stages"),
        ("gpt/moe.py", "--top_k 9", "--top_k must be 1 or more, and at most --n_experts"),
        ("gpt/local_sgd.py", "--sync_every 0", "--outer_lr above 0, --outer_momentum 0 to 1"),
    ],
)
def test_arguments_of_one_script(script, arguments, message, monkeypatch, capsys):
    assert_refused(script, arguments, message, monkeypatch, capsys)


def assert_refused(script, arguments, message, monkeypatch, capsys):
    """Within this process, since importing torch a hundred times would take minutes."""
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    if script not in ("singlegpu.py", "multigpu.py"):
        monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as exit:
        module(script).parse_args()
    assert exit.value.code == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith(f"{os.path.basename(script)}: error: ")
    assert last_line.endswith(message)


POSITIONAL = {
    "recipes/coordinator.py": "localhost:29400",
    "recipes/regroup.py": "--coordinator localhost:29400",
    "gpt/prepare_tokens.py": "tokens2 --text text",
}
BAD_VALUES = {int: ["0", "-1"], float: ["0", "-1", "nan", "inf"], str: ["", "no/such/path"]}
ALLOWED = {  # values that are none of these mistakes
    "--seed": ["0", "-1"],
    "--num_workers": ["0"],
    "--outer_momentum": ["0"],
    "--end_token": ["no/such/path"],
    "--frozen_layers": ["0"],
    "--generate": ["0"],
}
# What the number of ranks decides, or a connection or a file that main opens first of all.
CHECKED_BY_MAIN = {
    "recipes/gradient_accumulation.py": ["--global_batch_size"],
    "recipes/regroup.py": ["--coordinator"],
    "gpt/hsdp.py": ["--shard_size"],
    "gpt/documents.py": ["--end_token"],
    "gpt/prepare_tokens.py": ["--tokenizer", "folder"],
}


@pytest.mark.parametrize("script", [*SCRIPTS, *RECIPES, *POSITIONAL])
def test_every_argument(script, tmp_path, monkeypatch, capsys):
    """No number or path is accepted that could only fail later, so that no new one escapes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tokens").mkdir()
    for name in ("text", "model/config.json", "model/x.safetensors"):
        (tmp_path / name).touch()
    for name in ("tokenizer.json", "0.uint16"):
        (tmp_path / "tokens" / name).touch()
    if script not in ("singlegpu.py", "multigpu.py"):
        monkeypatch.setenv("LOCAL_RANK", "0")
    parsers = []
    parse_args = argparse.ArgumentParser.parse_args

    def note_and_parse(parser):
        parsers.append(parser)
        return parse_args(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", note_and_parse)
    right = POSITIONAL.get(script, "").split()
    monkeypatch.setattr(sys, "argv", [script, *right])
    module(script).parse_args()
    accepted = []
    for action in parsers[0]._actions:
        option = action.option_strings[:1]
        if (option or [action.dest])[0] in CHECKED_BY_MAIN.get(script, []):
            continue
        for value in bad_values(action):
            arguments = [*right, *option, value] if option else [value, *right[1:]]
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            try:
                module(script).parse_args()
                accepted.append((*option, value))
            except SystemExit as exit:
                assert exit.code == 2
    assert not accepted
    capsys.readouterr()


def bad_values(action):
    """Returns the values that an argument must refuse."""
    if action.nargs == 0 or action.choices:
        return []
    kind = action.type if action.type in (int, float) else str
    allowed = ALLOWED.get(*action.option_strings[:1] or [""], [])
    return [value for value in BAD_VALUES[kind] if value not in allowed]


@pytest.mark.parametrize("script", SCRIPTS[2:] + RECIPES)
def test_without_torchrun(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as exit:
        module(script).parse_args()
    assert exit.value.code == 2
    error = documented_error("start this script with torchrun, as its first lines show")
    assert capsys.readouterr().err.endswith(f"{os.path.basename(script)}: error: {error}\n")
    top = " ".join((ROOT / script).read_text().partition("Trains for 50")[0].split())
    assert "torchrun --" in top and f" {script} 50 10" in top


def test_more_processes_than_gpus(shell):
    job = shell.start(
        "torchrun --standalone --nproc_per_node=2 multigpu_torchrun.py", **pretend_gpus(1)
    )
    error = documented_error("has too few GPUs: lower --nproc_per_node")
    job.fails(f"{socket.gethostname()} {error}")


def broken_snapshots():
    other = {"model": {"net1.weight": torch.zeros(3, 3)}, "optimizer": {}, "epochs_run": 1}
    return {"other model": other, "list": [1, 2], "no keys": {}}


@pytest.mark.parametrize("kind", [*broken_snapshots(), "half", "text", "empty", "folder"])
def test_what_is_no_snapshot(kind, tmp_path, monkeypatch):
    path = tmp_path / "snapshot.pt"
    if kind in broken_snapshots():
        torch.save(broken_snapshots()[kind], path)
    elif kind == "half":
        torch.save({"model": {}, "optimizer": {}, "epochs_run": 3}, path)
        path.write_bytes(path.read_bytes()[:700])
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("hello" if kind == "text" else "")
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "5", "5", "--snapshot_path", str(path)])
    with pytest.raises(SystemExit) as exit:
        singlegpu.main(singlegpu.parse_args())
    error = documented_error(": move it or set another --snapshot_path")
    lines = exit.value.code.splitlines()
    assert len(lines) == 2 and lines[0] == f"cannot load {path}{error}"
    assert re.match(r"\w+\(.*\)$", lines[1])  # such as KeyError('model')
    assert path.stat().st_mtime_ns == before


def test_full_disk(shell):
    """A write fails in its middle: the snapshot from before stays."""
    shell.ranks("singlegpu.py 1").succeeds()
    job = shell.ranks_on([shell.folder], "singlegpu.py 3 1", full_disk_folders=[shell.folder])
    error = documented_error(": disk full, or file used by another run?")
    job.fails(f"cannot save snapshot.pt{error} [Errno 27] File too large")
    assert load(shell.folder / "snapshot.pt")["epochs_run"] == 1


def test_full_disk_and_a_large_model(shell):
    """torch then raises an error of its own, since it fails to end the file that it has begun."""
    setup = """
script.ToyModel = lambda: nn.Sequential(nn.Linear(10, 10**5), nn.Linear(10**5, 5))
script.ToyDataset = lambda _: torch.utils.data.TensorDataset(torch.zeros(1, 10), torch.zeros(1, 5))
"""
    script = patch(shell.folder, "singlegpu.py", setup)
    job = shell.ranks_on([shell.folder], f"{script} 1 1", full_disk_folders=[shell.folder])
    job.fails("cannot save snapshot.pt: disk full, or file used by another run?", "unexpected pos")
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("singlegpu.py", "--batch_size 1"),
        ("resumable.py", "--batch_size 1 --save_every_steps 10000"),
        ("elastic_ddp.py", "--global_batch_size 1 --save_every_steps 10000"),
    ],
)
def test_loss_that_is_not_finite(shell, script, options):
    """The snapshot from before stays; elastic_ddp.py saves none at its exit, either."""
    shell.ranks(f"{script} 1").succeeds()
    before = (shell.folder / "snapshot.pt").read_bytes()
    assert_not_finite(shell.ranks(f"{script} 3 1 {options}"))
    assert (shell.folder / "snapshot.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("script", "options"), [("gpt/gpt.py", ""), ("gpt/async_save.py", SHORT_VAL)]
)
def test_loss_of_a_gpt_that_is_not_finite(shell, script, options):
    write_text(shell.folder / "text", 128 + VAL_CHUNKS, 8)
    script = patch(shell.folder, script, SHORT_GPT)
    options += f" {TINY} --text text --save_every_steps 2 --learning_rate 1e30"
    assert_not_finite(shell.ranks(f"{script} 3 1 --snapshot_path s {options}"))
    assert not (shell.folder / "s").exists()


def assert_not_finite(job):
    job.fails(
        documented_error(
            "cannot save: the loss or a weight is nan or inf; lower the learning rate?"
        )
    )
    assert "Traceback" not in job.output


def test_folder_of_somebody_else(tmp_path):
    """As root, who may write anywhere, this turns into an ordinary user first."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv.pop()); import singlegpu\n"
        "os.getuid() or os.setuid(65534)\n"
        "singlegpu.parse_args()"
    )
    result = run("python", "-c", code, "--snapshot_path", tmp_path / "s.pt", ROOT)
    tmp_path.chmod(stat.S_IRWXU)
    assert result.returncode == 2
    assert result.stderr.endswith(
        f"error: cannot write {tmp_path}/s.pt: create its folder, or set another path\n"
    )


def test_two_runs_with_one_snapshot(shell):
    """One has renamed the other's temporary file: the other says so, and does not blame the disk.

    Saving is slowed down until both have written, so that they do meet.
    """
    setup = """
replace = os.replace
def wait_and_replace(source, target):
    open(f"ready.{os.getpid()}", "w").close()
    while len([name for name in os.listdir() if name.startswith("ready")]) < 2:
        time.sleep(0.01)
    replace(source, target)
script.os.replace = wait_and_replace
"""
    script = patch(shell.folder, "singlegpu.py", setup)
    jobs = [shell.start(f"python {script} 1") for _ in range(2)]
    failed = [job for job in jobs if job.wait() != 0]
    assert len(failed) == 1
    failed[0].fails(
        "cannot save snapshot.pt: disk full, or file used by another run?",
        "[Errno 2] No such file or directory: 'snapshot.pt.tmp'",
    )
    assert load(shell.folder / "snapshot.pt")["epochs_run"] == 1


def test_node_that_missed_the_snapshot(shell, monkeypatch):
    """Two nodes without a shared disk: only one of them has the snapshot of the first run."""
    (shell.folder / "a").mkdir()
    snapshot = shell.folder / "a" / "snapshot.pt"
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "10", "--snapshot_path", str(snapshot)])
    singlegpu.main(singlegpu.parse_args())
    error = documented_error(": share or copy the snapshot and data, use one seed")
    job = shell.ranks_on([shell.folder / "a", shell.folder / "b"], "multinode.py 20 5")
    job.fails("[(10, 'seed 0, 2048 samples'), (0, 'seed 0, 2048 samples')]" + error)
    assert load(snapshot)["epochs_run"] == 10


def test_finished_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "1"])
    singlegpu.main(singlegpu.parse_args())
    before = (tmp_path / "snapshot.pt").stat().st_mtime_ns
    capsys.readouterr()
    singlegpu.main(singlegpu.parse_args())
    output = capsys.readouterr().out
    message = documented_error(
        "nothing left to train: raise total_epochs, or set another --snapshot_path"
    )
    start = f"1 of 1 epochs done, 64 steps per epoch, on cpu of {socket.gethostname()}"
    assert output == f"{start}\n{message}\n"
    assert (tmp_path / "snapshot.pt").stat().st_mtime_ns == before
