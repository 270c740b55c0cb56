"""Each way to start a script, and each framework, as people use it: see LAUNCHERS.md.

Install requirements-launchers.txt first; what is not installed is skipped.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import audit, run_rankcheck
from rankcheck.launch.scripts import launcher

SCRIPTS = Path(__file__).parent / "scripts" / "launchers"
OWN_SAMPLER = "use_distributed_sampler=False"
# Of each script: its package, its arguments, what is said of it, an edit, and what is said then.
CASES = {
    "torchrun": ("torch", [], {"RC403", "RC604"}, "sampler.set_epoch(epoch)", "pass", "RC201"),
    "spawn": ("torch", [], set(), "loader.sampler.set_epoch(epoch)", "pass", "RC201"),
    "hydra_main": (
        "hydra",
        ["epochs=2"],
        set(),
        "loader.sampler.set_epoch(epoch)",
        "pass",
        "RC201",
    ),
    "accelerated": (
        "accelerate",
        [],
        set(),
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, ",
        "model, optimizer, scheduler = accelerator.prepare(model, optimizer, ",
        "RC203",
    ),
    "hf_trainer": (
        "transformers",
        [],
        {"RC604"},
        "train_dataset=Tokens()",
        "train_dataset=torch.utils.data.random_split(Tokens(), [48, 16])[0]",
        "RC204",
    ),
    # Its handler of SIGTERM may hang: https://github.com/Lightning-AI/pytorch-lightning/issues/20806
    "lightning_trainer": (
        "lightning",
        [],
        {"RC601", "RC602", "RC604"},
        "logger=False",
        f"logger=False, {OWN_SAMPLER}",
        "RC203",
    ),
    # Fabric sets the epoch by itself: after a restart, to 0.
    "fabric_launch": (
        "lightning",
        [],
        {"RC507", "RC604"},
        "setup_dataloaders(loader)",
        f"setup_dataloaders(loader, {OWN_SAMPLER})",
        "RC203",
    ),
    "fabric_run": (
        "lightning",
        [],
        set(),
        'fabric.all_reduce(loss.detach(), reduce_op="mean")',
        "loss.detach()",
        "RC701",
    ),
}


# Edits of a script that cannot be run, the options, and what is said.
CANNOT = [
    (
        "lightning_trainer",
        ("", ""),
        ["--launcher", "python"],
        "Lightning starts its ranks itself here: pass --launcher torchrun",
    ),
    (
        "fabric_launch",
        ("devices=2", "devices=1"),
        [],
        "Lightning's devices=1 trains on one GPU alone: pass --ranks 1",
    ),
    (
        "lightning_trainer",
        ('strategy="ddp"', 'strategy="deepspeed"'),
        [],
        "DeepSpeed needs GPUs: check the script with strategy='ddp'",
    ),
    (
        "hf_trainer",
        ("bf16=True", "deepspeed='zero2.json'"),
        [],
        "DeepSpeed needs GPUs: check the script with deepspeed=None",
    ),
]


@pytest.mark.parametrize(
    "line, expected",
    [
        ("import torch", "python"),
        ("mp.spawn(main, nprocs=2)", "python"),
        ("dist.init_process_group()", "torchrun"),
        ("accelerator = Accelerator()", "torchrun"),
        ("from transformers import Trainer, TrainingArguments", "torchrun"),
        ("class Trainer: pass", "python"),
        ("import lightning as L", "torchrun"),
        ("from pytorch_lightning import Trainer", "torchrun"),
        ("import torch  # see lightning.ai", "python"),
        ("import lightning as L; L.Trainer(strategy='ddp_spawn')", "python"),
    ],
)
def test_launcher(line, expected):
    assert launcher(f"import os\n{line}\n") == expected


def test_environment_below_the_script():
    """What a virtual environment holds is no script, also if it is in the script's folder."""
    code = "import torch; from rankcheck import witness; print(witness.is_library_file(TORCH))"
    code = f"TORCH = {torch.__file__!r}; {code}"
    script = Path(torch.__file__).parents[4] / "train.py"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"WITNESS_SCRIPT": str(script)}
    assert subprocess.check_output(command, env=environment, text=True, timeout=600) == "True\n"


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_right_script(tmp_path, name):
    package, arguments, said, *_ = CASES[name]
    pytest.importorskip(package)
    found = audit(tmp_path, SCRIPTS / f"{name}.py", *arguments)
    assert {f.rule for f in found if f.rule} <= said, found
    assert not [f for f in found if "please report" in f.text]
    same = [f for f in found if f.level == "ok" and "that of one process" in f.text]
    assert same or name == "spawn", found


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_faulty_script(tmp_path, name):
    package, arguments, _, old, new, rule = CASES[name]
    pytest.importorskip(package)
    source = (SCRIPTS / f"{name}.py").read_text()
    assert source.count(old) == 1
    (tmp_path / "faulty.py").write_text(source.replace(old, new))
    found = audit(tmp_path, tmp_path / "faulty.py", *arguments)
    assert rule in {f.rule for f in found}, found


@pytest.mark.nightly
@pytest.mark.parametrize("name, edit, options, said", CANNOT)
def test_what_cannot_be_run(tmp_path, name, edit, options, said):
    pytest.importorskip(CASES[name][0])
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / f"{name}.py").read_text().replace(*edit))
    result = run_rankcheck(*options, script, folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith(f"It could not be run:\n| {said}\n"), result.stderr


def test_error_of_a_handler(tmp_path):
    """A signal's handler may run while the witness notes something: its error is the script's."""
    code = """
import os, signal
from rankcheck import witness

def handle(signum, frame):
    raise RuntimeError("of the handler")

signal.signal(signal.SIGTERM, handle)
witness.held("steps", os.kill)(os.getpid(), signal.SIGTERM)
"""
    environment = os.environ | {"WITNESS_FOLDER": str(tmp_path)}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.stderr.endswith("RuntimeError: of the handler\n"), result.stderr
    assert not [*tmp_path.iterdir()]
