"""Each two files make one script that trains, resumes and logs as both of them do.

What is proven stands in tools/compose/pairs.json; with WRITE_PAIRS set, the nightly tests write
what they find there.
"""

import ast
import fcntl
import itertools
import json
import math
import os
import re

import pytest
from gpt_helpers import FINETUNE, FLOAT64, TOKENS, data_options
from gpt_helpers import OPTIONS as GPT_OPTIONS
from helpers import (
    FORK,
    KILL,
    LONG,
    NIGHTLY,
    PLAIN_SGD,
    SHORT_GPT,
    SIGNAL,
    assert_trained,
    curves,
    equal_snapshots,
    first,
    patch,
    read_script,
    resize,
)

from tools.compose.compose import BASES, PAIRS, ancestors, compose, read_pairs, series
from tools.launch.jobs import Shell
from tools.launch.snapshots import load_gpt, max_abs_diff
from tools.steps import ROOT, STAGES

WRITE = "WRITE_PAIRS" in os.environ
FILES = [file for file in BASES if file not in STAGES[:4] and series(file) != "by_hand"]
CHOICES = [
    pair
    for pair in itertools.combinations(FILES, 2)
    if series(pair[0]) == series(pair[1])
    and pair[0] not in ancestors(pair[1])
    and pair[1] not in ancestors(pair[0])
]
SAMPLE = [
    ("preemptible.py", "recipes/evaluate.py"),
    ("recipes/own_disks.py", "recipes/save_after_failure.py"),
    ("gpt/accumulate.py", "gpt/hsdp.py"),
    ("preemptible.py", "recipes/monitor.py"),
    ("recipes/mixed_precision.py", "recipes/evaluate.py"),
]
ASKED = ["proven", "conflict", None]  # all others have a reason against them
OTHERS = [
    pair for pair in CHOICES if pair not in SAMPLE and read_pairs().get(" + ".join(pair)) in ASKED
]
# So that a part does what it adds.
OPTIONS = {
    **GPT_OPTIONS,
    "recipes/gradient_accumulation.py": "--micro_batch_size 8",
    "recipes/monitor.py": "--log_every 20",
    "elastic_ddp.py": "--global_batch_size 64",
    "recipes/own_disks.py": "--snapshot_path snapshot",  # in the folder of each node
    **dict.fromkeys(["gpt/moe.py", "gpt/expert_parallel.py"], "--n_experts 2 --top_k 1"),
    "gpt/llama.py": "--n_head 4 --n_kv_head 2",
    "gpt/documents.py": f"{GPT_OPTIONS['gpt/documents.py']} --recompute",
    "gpt/chunked_loss.py": "--loss_chunks 4 --recompute",
}
# These train to other weights than multinode.py, or gpt/pretrain.py; all others to the same.
DECIDING = [
    "recipes/mixed_precision.py",
    "recipes/gradient_accumulation.py",  # in bfloat16, where the size of a micro-batch shows
    "recipes/evaluate.py",
    "recipes/images.py",
    "recipes/stream.py",
    "gpt/slow_network.py",
    "gpt/tokens.py",
    "gpt/llama.py",
    "gpt/documents.py",
    "gpt/moe.py",
    "gpt/local_sgd.py",
    "gpt/muon.py",
    *FINETUNE,
]
BATCH_SIZE = 8  # of a GPT: the samples of a global batch
EVERY_STEP = f"{PLAIN_SGD}{read_script('sync_every_step.py')}"


def decides(file):
    return [name for name in DECIDING if name in ancestors(file)][-1:]


class Run:
    """What two ranks have saved and logged, and which lines of the script they have run."""

    def __init__(self, shell, script, options, setup, ranks, stop=None):
        folder = shell.folder / f"run{len(shell.jobs)}"
        folder.mkdir()
        path = patch(folder, script, f"{SHORT_GPT}{read_script('trace_lines.py')}{setup}")
        command = f"{path} 2 1 --snapshot_path {folder}/snapshot {options}"
        ranks = [folder / "node1", folder / "node2"] * (ranks // 2) or [folder / "node1"]
        self.output = ""
        if stop:
            job = shell.ranks_on(ranks, command, **stop)
            assert job.wait() != 0
            self.output = job.output
            by_signal = stop.get("SIGNAL") == "15"
            assert ("stopped by a signal" in self.output) == by_signal, self.output
        self.output += shell.ranks_on(ranks, command).succeeds()
        path = folder / "snapshot"
        self.snapshot = load_gpt(path if path.exists() else folder / "node1" / "snapshot")
        text = (ROOT / script).read_text().splitlines()
        numbers = {int(n) for file in folder.rglob("lines.*") for n in file.read_text().split()}
        self.lines = {text[number - 1] for number in numbers}
        # The lines and curves of a loss, without what differs from run to run.
        lines = [line for line in self.output.splitlines() if "loss " in line]
        self.logged = {
            re.sub(r"(saved|saving) \S+|[\d.,]+ tokens/s.*|samples_per_second.*", "", x)
            for x in lines
        }
        for path in folder.rglob("*tfevents*"):
            for tag, points in curves(path.parent).items():
                if not re.search("second|memory|share|_ms", tag):
                    self.logged |= {(tag, step, f"{value:.4g}") for step, value in points}

    def weights(self):
        return self.snapshot.get("model") or self.snapshot["node_0"]["model"]


def train(shell, parts, script=None, setup="", stop=None, ranks=2):
    """Trains what `parts` train, by a script of theirs; each but a stopped one once."""
    data = next((part for part in parts if part in (*TOKENS, *FINETUNE)), parts[0])
    files = dict.fromkeys(file for part in parts for file in reversed(ancestors(part)))
    options = " ".join(dict.fromkeys(OPTIONS.get(file, "") for file in files))
    if "gpt/pipeline_parallel.py" in files:  # has micro-batches of its own
        options = options.replace(OPTIONS["gpt/accumulate.py"], "")
    if series(data) == "gpt":
        folder = shell.folder / (data if data in (*TOKENS, *FINETUNE) else "text").replace("/", "_")
        if data not in FINETUNE:
            options += " --n_layer 2"
        shared = math.prod(map(int, dict(re.findall(r"--(.p)_size (\d+)", options)).values()))
        if shared > 1 and {"gpt/hsdp.py", "gpt/local_sgd.py", "gpt/three_d.py"} & {*files}:
            ranks = 4
        batch_size = BATCH_SIZE * shared // ranks
        options = f"{data_options(folder, data)} --batch_size {batch_size} {options}"
        setup = ("" if data in FINETUNE else FLOAT64) + setup
    elif not {"recipes/images.py", "recipes/stream.py"} & {*files}:
        setup += resize(2050)  # of which the ranks can share four fifths
    options += " --save_every_steps 5" if "resumable.py" in files else ""
    setup += FORK + SIGNAL if "preemptible.py" in files else KILL
    key = (script or parts[0], options, setup, ranks)
    if stop:
        workers = " --num_workers 1" if "SIGNAL" in stop else ""
        return Run(shell, script, options + workers, setup, ranks, stop)
    if key not in RUNS:
        RUNS[key] = Run(shell, *key)
    return RUNS[key]


RUNS = {}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("compose"))
    yield shell
    shell.end_all()


def write_composed(shell, parts):
    """Returns the path of the script, and its lines with their sources."""
    lines = compose(list(parts), "composed.py")
    script = shell.folder / f"{'_'.join(parts).replace('/', '_')}"
    script.write_text("\n".join(line for line, _ in lines) + "\n")
    return script, lines


def prove(shell, pair):
    """Asserts that a composed script does what its parts do, each as it does so alone."""
    script, lines = write_composed(shell, pair)
    deciding = sorted({name for part in pair for name in decides(part)}, key=DECIDING.index)
    parts = deciding[-1:] or ["gpt/pretrain.py" if series(pair[0]) else "multinode.py"]
    twin, ranks = None, 2
    setup = more = ""
    if len(deciding) > 1 and deciding[0] == "recipes/mixed_precision.py":
        more = read_script("in_bfloat16.py")
        parts = deciding[1:]
    elif len(deciding) == 2 and "gpt/local_sgd.py" in deciding:
        setup = EVERY_STEP  # then it trains as without it
        parts = [next(name for name in deciding if name != "gpt/local_sgd.py")]
    elif len(deciding) == 2 and "gpt/muon.py" in deciding:
        parts = [next(name for name in deciding if name != "gpt/muon.py")]
        more = read_script("with_muon.py")
    straight = train(shell, pair, script, setup)
    if deciding == ["gpt/tokens.py", "gpt/moe.py"]:  # no file does both
        parts, ranks = deciding, 1
    if len(parts) > 1:
        twin, _ = write_composed(shell, parts)
    expected = train(shell, parts, twin, setup + more, ranks=ranks).weights()
    weights = straight.weights()
    assert weights.keys() == expected.keys()
    diff = max_abs_diff([weights[name] for name in expected], expected.values())
    print(f"{' + '.join(pair)} differs from {' + '.join(parts)} by {diff:.1e}")
    assert diff < (1e-12 if series(pair[0]) and parts[0] not in FINETUNE else 1e-6)
    for part in pair:
        added = {line for line, source in lines if source == part}
        missing = added & train(shell, [part], setup=setup).lines - straight.lines
        assert not missing
    stop = {"SIGNAL": "15", "SIGNAL_AT": "0 16" if series(pair[0]) else "1 320"}
    if not any("preemptible.py" in ancestors(part) for part in pair):
        stop = {"KILL_AT": "40"}
    elif any("recipes/evaluate.py" in ancestors(part) for part in pair):
        stop["SIGNAL_AT"] = "evaluation"  # whose data workers must live on, too
    if "recipes/save_after_failure.py" in pair:
        where = {"recipes/stream.py": 512, "recipes/evaluate.py": 576}
        at = where.get(parts[-1], 448)  # where the unbroken run saves, too
        stop = {"SIGNAL": "9", "SIGNAL_AT": f"1 {at}", "SIGNAL_RANK": "0"}  # rank 1 saves
        setup += read_script("share_loss.py")
    resumed = train(shell, pair, script, setup, stop)
    if "recipes/save_after_failure.py" in pair:
        assert f"epoch 1 + {at} samples" in resumed.output
    # A resumed run adds the same losses in another order.
    losses = [run.snapshot.pop("loss", 0) for run in (resumed, straight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert equal_snapshots(resumed.snapshot, straight.snapshot)
    missing = straight.logged - resumed.logged
    assert not missing


def fits(pair):
    """Tells whether a script comes of it."""
    try:
        ast.parse("\n".join(line for line, _ in compose(list(pair), "composed.py")))
    except SyntaxError:  # as the marks of a conflict are
        return False
    return True


def write(pair, found):
    with open(__file__) as lock:  # other processes write, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_pairs() | {" + ".join(pair): found}
        table = {"proven": {}, "conflict": {}}
        for first, other in [choice for choice in CHOICES if " + ".join(choice) in known]:
            files = table.setdefault(known[f"{first} + {other}"], {})
            files[first] = f"{files.get(first, '')} {other}".strip()
        rows = []
        for verdict, files in table.items():
            indent = 1 if len(files) > 3 else None  # a line, if it is short
            rows.append(f"{json.dumps(verdict)}: {json.dumps(files, indent=indent)}")
        PAIRS.with_suffix(".tmp").write_text("{\n" + ",\n".join(rows) + "\n}\n")
        PAIRS.with_suffix(".tmp").replace(PAIRS)


@pytest.mark.long  # by day, test_own_script of test_compose.py trains a composed one
@pytest.mark.parametrize(
    "pair",
    [*SAMPLE, *(pytest.param(pair, marks=NIGHTLY) for pair in OTHERS)],
    ids=" + ".join,
)
def test_pair(workshop, pair):
    known = read_pairs().get(" + ".join(pair))
    if WRITE:
        known = "proven" if fits(pair) else "conflict"
    if known == "proven":
        prove(workshop, pair)
    elif known == "conflict":
        assert not fits(pair)
    if WRITE:
        write(pair, known)


def test_table_is_complete():
    """Each two files are proven or refused with a reason; some of gpt/ are in conflict."""
    pairs = read_pairs()
    new = pairs.keys() ^ {" + ".join(pair) for pair in CHOICES}
    assert not new, "run: WRITE_PAIRS=1 pytest -m '' tests/tools/test_pairs.py"
    assert all("gpt/" in pair for pair, result in pairs.items() if result == "conflict")


MIXED_AND_ACCUMULATED = ("recipes/mixed_precision.py", "recipes/gradient_accumulation.py")


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        # The files of the pages' examples.
        ("preemptible.py", "recipes/mixed_precision.py", "recipes/evaluate.py"),
        ("gpt/documents.py", "gpt/chunked_loss.py", "gpt/hsdp.py"),
        ("gpt/documents.py", "gpt/context_parallel.py", "gpt/hsdp.py"),
        # Each two of them change the same lines.
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED),
        (*MIXED_AND_ACCUMULATED, "recipes/step_timeout.py"),
        (*MIXED_AND_ACCUMULATED, "recipes/own_disks.py"),
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED, "recipes/monitor.py"),
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED, "recipes/evaluate.py"),
        (*MIXED_AND_ACCUMULATED, "recipes/fsdp.py"),
    ],
    ids=" + ".join,
)
def test_several(workshop, parts):
    prove(workshop, parts)


@pytest.mark.parametrize(
    "parts",
    first(
        1,
        [
            "recipes/mixed_precision.py recipes/gradient_accumulation.py",
            "recipes/mixed_precision.py",
            "recipes/gradient_accumulation.py",
        ],
        LONG,
    ),
)
def test_uneven_shards(shell, parts):
    """With elastic_ddp.py, each sample of a batch of 63 counts once, in micro-batches as well."""
    composed, _ = write_composed(shell, ["elastic_ddp.py", *parts.split()])
    script = patch(shell.folder, composed, read_script("in_float32.py"), "uneven.py")
    micro = "--micro_batch_size 8" if "accumulation" in parts else ""
    shell.ranks(f"{script} 2 1 --global_batch_size 63 {micro}", 2).succeeds()
    assert_trained(shell.folder / "snapshot.pt", 2, 63)
