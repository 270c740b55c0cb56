"""What beginners do: each mistake gets one clear line, a non-zero exit, and nothing is lost."""

import argparse
import io
import itertools
import os
import re
import socket
import sys

import pytest
import torch
from gpt_helpers import TINY
from helpers import (
    LONG,
    SCRIPTS,
    SHORT_VAL,
    VAL_CHUNKS,
    documented_error,
    module,
    patch,
)
from rankcheck.launch.jobs import pretend_gpus

import singlegpu
from tools import steps
from tools.launch.snapshots import load, write_text
from tools.steps import ROOT

RECIPES = [step.file for step in steps.RECIPES + steps.BY_HAND + steps.GPT]
TP_SIZE = "--tp_size must be 1 or more, and divide both --n_head and --context"
GPT = f"{TINY} --text text --generate 0 --learning_rate 1e30"
N_KV_HEAD = "--n_kv_head must divide --n_head, and --n_embd / --n_head be even"
OF_LLAMA = "--tp_size must be 1 or more, and divide --n_kv_head, --n_hidden, --context"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("singlegpu.py", "0", "error: argument total_epochs: must be 1 or more"),
        ("gpt/gpt.py", "--text missing.txt", "cannot read --text missing.txt"),
        ("gpt/gpt.py", "--n_head 3", "error: --n_head must divide --n_embd"),
        ("gpt/llama.py", "--n_kv_head 3", N_KV_HEAD),
        ("gpt/llama.py", "--n_head 2 --n_embd 6", N_KV_HEAD),
        ("gpt/llama_tensor_parallel.py", "--tp_size 2", OF_LLAMA),
        ("gpt/documents.py", "--n_embd 16", "must be 16 or more for FlexAttention, on GPUs"),
        ("gpt/chunked_loss.py", "--loss_chunks 5", "must be 1 or more, and divide --context"),
        ("gpt/evaluate.py", "--val_tokens 63", "--val_tokens must be at least --context"),
        ("gpt/dcp.py", "10000", "must be 9999 or less: names of snapshots have four digits"),
        ("gpt/tensor_parallel.py", "--tp_size 4", TP_SIZE),
        ("gpt/tensor_parallel.py", "--context 9 --tp_size 2", TP_SIZE),
        ("gpt/context_parallel.py", "--cp_size 4", TP_SIZE.replace("tp", "cp")),
        ("gpt/context_parallel.py", "--context 9 --cp_size 2", TP_SIZE.replace("tp", "cp")),
        ("gpt/pipeline_parallel.py", "--pp_size 5", "at most --n_layer and --micro_batches"),
        ("gpt/pipeline_parallel.py", "--micro_batches 5", "must divide --batch_size"),
        ("gpt/pipeline_parallel.py", "--generate 1", "must be 0: no rank has all stages"),
        ("gpt/moe.py", "--top_k 9", "--top_k must be 1 or more, and at most --n_experts"),
        ("gpt/local_sgd.py", "--sync_every 0", "--outer_lr above 0, --outer_momentum 0 to 1"),
    ],
)
def test_arguments(script, arguments, message, monkeypatch, capsys):
    """Within this process, since importing torch a hundred times would take minutes."""
    monkeypatch.setattr(sys, "argv", [script, *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if script != "singlegpu.py":
        monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        module(script).parse_args()
    assert capsys.readouterr().err.endswith(f"{message}\n")


POSITIONAL = {
    "gpt/prepare_tokens.py": "tokens2 --text text",
    "gpt/export.py": "model tokens exported",
    "gpt/evaluate_snapshot.py": "model --text text",
    "gpt/chats.py": "model",
    "gpt/ask.py": "model",
}
BAD_VALUES = {int: ["0", "-1"], float: ["0", "-1", "nan", "inf"], str: ["", "no/such/path"]}
ALLOWED = {  # values that are none of these mistakes
    "--seed": ["0", "-1"],
    "--num_workers": ["0"],
    "--outer_momentum": ["0"],
    "--end_token": ["no/such/path"],
    "--generate": ["0"],
}
# What the number of ranks decides, or a connection or a file that main opens first of all.
CHECKED_BY_MAIN = {
    "gpt/hsdp.py": ["--shard_size"],
    "gpt/frozen_layers.py": ["--frozen_layers"],
    "gpt/finetune_chat.py": ["--frozen_layers"],
    "gpt/prepare_tokens.py": ["--tokenizer", "folder"],
    "gpt/export.py": ["snapshots"],
    "gpt/evaluate_snapshot.py": ["snapshots"],
}
LATER = [step.file for step in steps.LATER_RECIPES]


@pytest.mark.parametrize("script", dict.fromkeys([*SCRIPTS, *RECIPES, *LATER, *POSITIONAL]))
def test_every_argument(script, tmp_path, monkeypatch, capsys):
    """Each number or path that could only fail later gets a line, so that no new one escapes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tokens").mkdir()
    for name in ("text", "model/config.json", "model/x.safetensors"):
        (tmp_path / name).touch()
    for name in ("tokenizer.json", "end_token.txt", "0.uint16"):
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
    parsed = vars(module(script).parse_args())
    right = [*itertools.dropwhile(lambda word: not word.startswith("--"), right)]  # its options
    names = [action.dest for action in parsers[0]._actions if not action.option_strings]
    values = {name: str(parsed[name]) for name in names}
    accepted = []
    for action in parsers[0]._actions:
        option = action.option_strings[:1]
        if (option or [action.dest])[0] in CHECKED_BY_MAIN.get(script, []):
            continue
        for value in bad_values(action):
            replaced = values if option else values | {action.dest: value}
            arguments = [*replaced.values(), *right, *option, *([value] if option else [])]
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            try:
                module(script).parse_args()
                accepted.append((option or action.dest, value))
            except SystemExit as exit:
                assert exit.code == 2
                last_line = capsys.readouterr().err.splitlines()[-1]
                assert last_line.startswith(f"{os.path.basename(script)}: error: ")
    assert not accepted, "refuse them, or name them in ALLOWED"


def bad_values(action):
    """Returns the values that an argument must refuse."""
    if action.nargs == 0 or action.choices:
        return []
    kind = action.type if action.type in (int, float) else str
    allowed = ALLOWED.get(*action.option_strings[:1] or [""], [])
    return [value for value in BAD_VALUES[kind] if value not in allowed]


@pytest.mark.parametrize("script", [s for s in SCRIPTS + RECIPES if s not in POSITIONAL])
def test_without_torchrun(script, monkeypatch, capsys):
    """Or, of the first two stages, with it."""
    error = "start this script with torchrun, as its first lines show"
    if script in SCRIPTS[:2]:
        monkeypatch.setenv("LOCAL_RANK", "0")
        error = "start this script with python, not with torchrun"
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as exit:
        module(script).parse_args()
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith(f"{os.path.basename(script)}: error: {error}\n")
    top = " ".join((ROOT / script).read_text().partition("Trains for 50")[0].split())
    shown = "torchrun --" in top and f" {script} 50 10" in top
    assert script in SCRIPTS[:2] or shown, "say in its docstring how torchrun starts it with 50 10"


def test_more_processes_than_gpus(shell):
    job = shell.ranks("multigpu_torchrun.py", 2, **pretend_gpus(1))
    error = documented_error("has too few GPUs: lower --nproc_per_node")
    job.fails(f"{socket.gethostname()} {error}")


def serialized(snapshot):
    buffer = io.BytesIO()
    torch.save(snapshot, buffer)
    return buffer.getvalue()


OTHER_MODEL = {"model": {"net1.weight": torch.zeros(3, 3)}, "optimizer": {}, "epochs_run": 1}
NO_SNAPSHOTS = {
    "other model": serialized(OTHER_MODEL),
    "no keys": serialized({}),
    "half": serialized(OTHER_MODEL)[:700],
    "text": b"hello",
    "empty": b"",
    "folder": None,
}


@pytest.mark.parametrize("content", NO_SNAPSHOTS.values(), ids=NO_SNAPSHOTS)
def test_what_is_no_snapshot(content, tmp_path, monkeypatch):
    path = tmp_path / "snapshot.pt"
    path.mkdir() if content is None else path.write_bytes(content)
    before = path.stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["singlegpu.py", "5", "5", "--snapshot_path", str(path)])
    with pytest.raises(SystemExit) as exit:
        singlegpu.main(singlegpu.parse_args())
    error = documented_error(": move it or set another --snapshot_path")
    lines = exit.value.code.splitlines()
    assert len(lines) == 2 and lines[0] == f"cannot load {path}{error}"
    assert re.match(r"\w+\(.*\)$", lines[1])  # such as KeyError('model')
    assert path.stat().st_mtime_ns == before


LARGE_MODEL = """
script.ToyModel = lambda: nn.Sequential(nn.Linear(10, 10**5), nn.Linear(10**5, 5))
script.ToyDataset = lambda _: torch.utils.data.TensorDataset(torch.zeros(1, 10), torch.zeros(1, 5))
"""


# Another run has renamed the temporary file.
OTHER_RUN = """
if sys.argv[1] == "3":
    before(os, "replace")(lambda source, target: os.remove(source))
"""


@pytest.mark.parametrize(
    ("setup", "is_full", "cause"),
    [
        ("", True, "File too large"),
        (LARGE_MODEL, True, "unexpected pos"),
        (OTHER_RUN, False, "FileNotFoundError(2, 'No such file or directory')"),
    ],
)
def test_cannot_save(shell, setup, is_full, cause):
    """The snapshot from before stays. Of a large one, torch fails to end the file it has begun."""
    script = patch(shell.folder, "singlegpu.py", setup)
    shell.ranks(f"{script} 1").succeeds()
    full = [shell.folder] if is_full else []
    job = shell.ranks_on([shell.folder], f"{script} 3 1", full_disk_folders=full)
    error = documented_error(": full disk, another run, or not plain numbers?")
    job.fails(f"cannot save snapshot.pt{error}", cause)
    assert "Traceback" not in job.output
    assert load(shell.folder / "snapshot.pt")["epochs_run"] == 1


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("singlegpu.py", "--batch_size 1"),
        pytest.param(
            "elastic_ddp.py", "--global_batch_size 1 --save_every_steps 10000", marks=LONG
        ),
        ("gpt/gpt.py", f"{GPT} --save_every_steps 2"),
        ("gpt/async_save.py", f"{GPT} {SHORT_VAL} --save_every_steps 2"),
    ],
)
def test_loss_that_is_not_finite(shell, script, options):
    write_text(shell.folder / "text", 128 + VAL_CHUNKS, 8)
    job = shell.ranks(f"{script} 3 1 {options}")
    if script == "gpt/async_save.py":
        job.fails(documented_error("the gradient of step 2 is nan or inf"), "--skip_steps 2")
        return
    job.fails(documented_error("cannot save: a weight is nan or inf; lower the learning rate?"))
    assert "Traceback" not in job.output
    assert not [*shell.folder.glob("snapshot*")]


def test_folder_of_somebody_else(shell):
    """As root, who may write anywhere, this turns into an ordinary user first."""
    setup = "os.chmod('.', 0o500)\nos.getuid() or os.setuid(65534)"
    script = patch(shell.folder, "singlegpu.py", setup)
    folder = shell.folder / "theirs"
    job = shell.ranks_on([folder], f"{script} 1")
    job.fails("error: cannot write snapshot.pt: create its folder, or set another path")
    folder.chmod(0o700)


def test_node_that_missed_the_snapshot(shell):
    """Two nodes without a shared disk: only one of them has the snapshot of the first run."""
    folders = [shell.folder / "a", shell.folder / "b"]
    shell.ranks_on(folders[:1], "multinode.py 1").succeeds()
    error = documented_error(": share the disk (or see own_disks.py), use one seed")
    job = shell.ranks_on(folders, "multinode.py 2 1")
    job.fails("[(1, 'seed 0, 2048 samples'), (0, 'seed 0, 2048 samples')]" + error)
    assert load(folders[0] / "snapshot.pt")["epochs_run"] == 1


def test_finished_run_says_so(shell):
    shell.ranks("singlegpu.py 1").succeeds()
    before = (shell.folder / "snapshot.pt").stat().st_mtime_ns
    output = shell.ranks("singlegpu.py 1").succeeds()
    message = documented_error(
        "nothing left to train: raise total_epochs, or set another --snapshot_path"
    )
    start = "1 of 1 epochs done, 64 steps per epoch, on cpu"
    assert output == f"{start}\n{message}\n"
    assert (shell.folder / "snapshot.pt").stat().st_mtime_ns == before
