"""Composed scripts: each two files make one that trains, resumes and logs as both of them do.

What is proven stands in tools/compose/pairs.json; with WRITE_PAIRS set, the nightly tests write what
they find there.
"""

import fcntl
import itertools
import json
import os
import re

import pytest
from helpers import KILL, NIGHTLY, PLAIN_SGD, SHORT_GPT, SIGNAL, VAL_CHUNKS
from helpers import equal_snapshots, patch, resize, run
from test_finetune import make_model, write_chats
from test_gpt import OPTIONS as GPT_OPTIONS
from test_gpt_sharded import FLOAT64
from test_recipes import OPTIONS as RECIPE_OPTIONS
from test_recipes import curves
from test_tokens import save_tokenizer

from tools.compose.__main__ import BASES, PAIRS, ancestors, compose, series
from tools.launch.jobs import Shell
from tools.launch.snapshots import load_gpt, max_abs_diff, write_text
from tools.steps import ROOT, STAGES

FILES = [file for file in BASES if file not in STAGES[:4] and series(file) != "by_hand"]
CHOICES = [
    pair
    for pair in itertools.combinations(FILES, 2)
    if series(pair[0]) == series(pair[1])
    and pair[0] not in ancestors(pair[1])
    and pair[1] not in ancestors(pair[0])
]
TOKENS = ("gpt/tokens.py", "gpt/llama.py")
FINETUNE = ("gpt/finetune.py", "gpt/finetune_chat.py")
# So that a part does what it adds.
OPTIONS = {
    **RECIPE_OPTIONS,
    **GPT_OPTIONS,
    "recipes/mixed_precision.py": "",
    "recipes/monitor.py": "--log_every 20",
    "elastic_ddp.py": "--global_batch_size 64",
    "gpt/accumulate.py": "--micro_batch_size 2",
    "gpt/pipeline_parallel.py": "--pp_size 2 --micro_batches 2",
    "gpt/three_d.py": "--tp_size 2 --micro_batches 2",
    "gpt/moe.py": "--n_experts 2 --top_k 1",
}
# These train to other weights than multinode.py, or gpt/pretrain.py; all others to the same.
DECIDING = [
    "recipes/mixed_precision.py",
    "recipes/evaluate.py",
    "recipes/images.py",
    "gpt/slow_network.py",
    "gpt/tokens.py",
    "gpt/llama.py",
    "gpt/moe.py",
    "gpt/local_sgd.py",
    *FINETUNE,
]
BATCH_SIZE, CHUNKS, CONTEXT = 8, 48, 8  # of a GPT: the samples of a global batch and of all
# Where two decide, one of them alone, with what the other does.
IN_BFLOAT16 = """
run_batch = script.Trainer._run_batch
def in_bfloat16(*arguments):
    with torch.autocast("cpu", torch.bfloat16):
        run_batch(*arguments)
script.Trainer._run_batch = in_bfloat16
"""
# The lines of the script that a rank runs, into a file.
TRACE = """
import atexit, threading
lines = set()
def trace(frame, event, arg):
    if frame.f_code.co_filename == script.__file__:
        lines.add(frame.f_lineno)
        return trace
sys.settrace(trace)
threading.settrace(trace)
@atexit.register
def write_lines():
    with open(f"lines.{os.environ['RANK']}", "w") as file:
        file.write(" ".join(map(str, lines)))
"""


def decides(file):
    return [name for name in DECIDING if name in ancestors(file)][-1:]


def prepare(folder, data):
    """Writes what a file of gpt/ learns, once; returns the options that say so."""
    context = 40 if data == "gpt/finetune_chat.py" else CONTEXT
    chunks = CHUNKS + VAL_CHUNKS
    if not folder.exists():
        folder.mkdir()
        if data == "gpt/finetune_chat.py":
            write_chats(folder / "text", chunks)
        else:
            write_text(folder / "text", chunks, CONTEXT)
        if data in FINETUNE:
            make_model(folder / "model", "Llama")
        save_tokenizer(folder / "tokenizer.json", 256)
        tokens = b"".join(bytes([byte, 0]) for byte in (folder / "text").read_bytes())
        (folder / "0.uint16").write_bytes(tokens)  # the same bytes
    options = f"--context {context} --val_tokens {VAL_CHUNKS * context}"
    if data in TOKENS:
        return f"{options} --n_layer 2 --n_head 2 --n_embd 16 --data {folder}"
    if data in FINETUNE:
        return f"{options} --text {folder}/text --model {folder}/model --export_path exported"
    return f"{options} --n_layer 2 --n_head 2 --n_embd 16 --text {folder}/text"


class Run:
    """What two ranks have saved and logged, and which lines of the script they have run."""

    def __init__(self, shell, script, options, setup, stop=None):
        folder = shell.folder / f"run{len(shell.jobs)}"
        folder.mkdir()
        path = patch(folder, script, f"{SHORT_GPT}{TRACE}{setup}")
        command = f"{path} 2 1 {options} --snapshot_path {folder}/snapshot"
        ranks = [folder / "node1", folder / "node2"]
        self.output = ""
        if stop:
            job = shell.ranks_on(ranks, command, **stop)
            assert job.wait() != 0
            self.output = job.output
        self.output += shell.ranks_on(ranks, command).succeeds()
        self.snapshot = load_gpt(folder / "snapshot")
        text = (ROOT / script).read_text().splitlines()
        numbers = {int(n) for file in folder.rglob("lines.*") for n in file.read_text().split()}
        self.lines = {text[number - 1] for number in numbers}
        # The lines and curves of a loss, without what differs from run to run.
        lines = [line for line in self.output.splitlines() if "loss " in line]
        self.logged = {
            re.sub(r"saved \S+|[\d.,]+ tokens/s.*|samples_per_second.*", "", x) for x in lines
        }
        for path in folder.rglob("*tfevents*"):
            for tag, points in curves(path.parent).items():
                if not re.search("second|memory|share|_ms", tag):
                    self.logged |= {(tag, step, f"{value:.4g}") for step, value in points}

    def weights(self):
        model = self.snapshot.get("model") or self.snapshot["node_0"]["model"]
        return model


def train(shell, parts, script=None, setup="", stop=None, data=None):
    """Trains what `parts` train, by a script of theirs; each but a stopped one once."""
    data = data or next((part for part in parts if part in (*TOKENS, *FINETUNE)), parts[0])
    files = dict.fromkeys(file for part in parts for file in reversed(ancestors(part)))
    options = " ".join(dict.fromkeys(OPTIONS.get(file, "") for file in files))
    if series(data) == "gpt":
        folder = shell.folder / (data if data in (*TOKENS, *FINETUNE) else "text").replace("/", "_")
        samples = BATCH_SIZE if re.search("--[tcp]p_size", options) else BATCH_SIZE // 2
        options = f"{prepare(folder, data)} --batch_size {samples} {options}"
        setup += FLOAT64 if data not in FINETUNE else ""
    elif "recipes/images.py" not in files:
        setup += resize(2050)  # of which the ranks can share four fifths
    options += " --save_every_steps 5" if "resumable.py" in files else ""
    setup += SIGNAL if "preemptible.py" in files else KILL
    key = (script or parts[0], options, setup)
    if stop:
        return Run(shell, *key, stop)
    if key not in RUNS:
        RUNS[key] = Run(shell, *key)
    return RUNS[key]


RUNS = {}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("compose"))
    yield shell
    shell.end_all()


def prove(shell, pair):
    """Asserts that a composed script does what its parts do, each as it does so alone."""
    lines = compose(list(pair), "composed.py")
    text = "\n".join(line for line, _ in lines) + "\n"
    script = shell.folder / f"{' '.join(pair)}.py".replace("/", "_").replace(" ", "_")
    script.write_text(text)
    setup = more = ""
    deciding = sorted({name for part in pair for name in decides(part)}, key=DECIDING.index)
    reference = deciding[-1] if deciding else "gpt/pretrain.py" if series(pair[0]) else "multinode.py"
    if len(deciding) == 2 and deciding[0] == "recipes/mixed_precision.py":
        more = IN_BFLOAT16
    straight = train(shell, pair, script, setup)
    expected = train(shell, [reference], setup=setup + more).weights()
    weights = straight.weights()
    assert weights.keys() == expected.keys()
    diff = max_abs_diff([weights[name] for name in expected], expected.values())
    tolerance = 1e-12 if series(pair[0]) and reference not in FINETUNE else 1e-6
    print(f"{' + '.join(pair)} differs from {reference} by {diff:.1e}")
    assert diff < tolerance
    for part in pair:
        added = {line for line, source in lines if source == part}
        assert not added & train(shell, [part]).lines - straight.lines
    stop = {"SIGNAL": "15", "SIGNAL_AT": "0 16" if series(pair[0]) else "1 320"}
    if not any("preemptible.py" in ancestors(part) for part in pair):
        stop = {"KILL_AT": "40"}
    resumed = train(shell, pair, script, setup, stop)
    # A resumed run adds the same losses in another order.
    losses = [run.snapshot.pop("loss", 0) for run in (resumed, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert equal_snapshots(resumed.snapshot, straight.snapshot)
    missing = straight.logged - resumed.logged
    assert not missing


@pytest.mark.parametrize("pair", CHOICES, ids=" + ".join)
def test_pair(workshop, pair):
    prove(workshop, pair)
