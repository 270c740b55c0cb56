"""Composed scripts: each two files make one that trains, resumes and logs as both of them do.

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
import shlex
import sys

import gpt_helpers
import pytest
from gpt_helpers import FINETUNE, FLOAT64, TOKENS, data_options
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
    edit,
    equal_snapshots,
    first,
    long,
    patch,
    resize,
    run,
)

from tools.compose.compose import BASES, PAIRS, ancestors, compose, read_pairs, series
from tools.compose.merge import merge
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
    **gpt_helpers.OPTIONS,
    "recipes/gradient_accumulation.py": "--micro_batch_size 8",
    "recipes/monitor.py": "--log_every 20",
    "elastic_ddp.py": "--global_batch_size 64",
    "recipes/own_disks.py": "--snapshot_path snapshot",  # in the folder of each node
    **dict.fromkeys(["gpt/moe.py", "gpt/expert_parallel.py"], "--n_experts 2 --top_k 1"),
    "gpt/llama.py": "--n_head 4 --n_kv_head 2",
    "gpt/documents.py": f"{gpt_helpers.OPTIONS['gpt/documents.py']} --recompute",
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
# Where two decide, one of them alone, with what the other does.
IN_BFLOAT16 = """
run_batch = script.Trainer._run_batch
def in_bfloat16(*arguments):
    with torch.autocast("cpu", torch.bfloat16):
        run_batch(*arguments)
script.Trainer._run_batch = in_bfloat16
"""
EVERY_STEP = f"""{PLAIN_SGD}
parse_args = script.parse_args
def parse():
    args = parse_args()
    if hasattr(args, "sync_every"):
        args.sync_every, args.outer_lr, args.outer_momentum = 1, 1.0, 0.0
    return args
script.parse_args = parse
"""
WITH_MUON = f"""
import runpy
muon = runpy.run_path({str(ROOT / "gpt" / "muon.py")!r})
script.configure_optimizer = muon["configure_optimizer"]
"""
# What save_after_failure.py estimates by the losses of one rank is then exact.
SAME_LOSS = """
@after(script.Trainer, "_run_batch")
def share_loss(self, inputs, targets):
    script.dist.all_reduce(self.total_loss)
    self.total_loss /= script.dist.get_world_size()
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


class Run:
    """What two ranks have saved and logged, and which lines of the script they have run."""

    def __init__(self, shell, script, options, setup, ranks, stop=None):
        folder = shell.folder / f"run{len(shell.jobs)}"
        folder.mkdir()
        path = patch(folder, script, f"{SHORT_GPT}{TRACE}{setup}")
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
        more = IN_BFLOAT16
        parts = deciding[1:]
    elif len(deciding) == 2 and "gpt/local_sgd.py" in deciding:
        setup = EVERY_STEP  # then it trains as without it
        parts = [next(name for name in deciding if name != "gpt/local_sgd.py")]
    elif len(deciding) == 2 and "gpt/muon.py" in deciding:
        parts = [next(name for name in deciding if name != "gpt/muon.py")]
        more = WITH_MUON
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
        setup += SAME_LOSS
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


@pytest.mark.parametrize(
    "pair",
    [*SAMPLE[:2], *long(*SAMPLE[2:]), *(pytest.param(pair, marks=NIGHTLY) for pair in OTHERS)],
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
    assert pairs.keys() == {" + ".join(pair) for pair in CHOICES}
    assert all("gpt/" in pair for pair, result in pairs.items() if result == "conflict")


MIXED_AND_ACCUMULATED = ("recipes/mixed_precision.py", "recipes/gradient_accumulation.py")


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        # The files of the pages' examples.
        ("preemptible.py", "recipes/mixed_precision.py", "recipes/evaluate.py"),
        ("gpt/documents.py", "gpt/chunked_loss.py", "gpt/hsdp.py"),
        # Each two of them change the same lines.
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED),
        (*MIXED_AND_ACCUMULATED, "recipes/step_timeout.py"),
        (*MIXED_AND_ACCUMULATED, "recipes/own_disks.py"),
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED, "recipes/monitor.py"),
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED, "recipes/evaluate.py"),
        ("elastic_ddp.py", *MIXED_AND_ACCUMULATED, "recipes/fsdp.py"),
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
    in_float32 = "torch.autocast = lambda *arguments: script.contextlib.nullcontext()\n"
    composed, _ = write_composed(shell, ["elastic_ddp.py", *parts.split()])
    script = patch(shell.folder, composed, in_float32, "in_float32.py")
    micro = "--micro_batch_size 8" if "accumulation" in parts else ""
    shell.ranks(f"{script} 2 1 --global_batch_size 63 {micro}", 2).succeeds()
    assert_trained(shell.folder / "snapshot.pt", 2, 63)


def compose_in(folder, arguments):
    return run(sys.executable, "-m", "tools.compose", *shlex.split(arguments.format(folder=folder)))


@pytest.mark.parametrize(
    "arguments, error",
    [
        ("multinode.py", "name two files or more"),
        ("evaluate.py preemptible.py", "not of the series: do you mean recipes/evaluate.py?"),
        ("recipes/fsdp.py no.py", "no.py is not of the series: if it is yours, name it first"),
        ("recipes/fsdp.py recipes/fsdp.py", "recipes/fsdp.py is named twice"),
        ("multinode.py recipes/fsdp.py", "recipes/fsdp.py contains multinode.py, on which it"),
        ("elastic_ddp.py gpt/fsdp.py", "elastic_ddp.py and gpt/fsdp.py are of different series"),
        ("recipes/fsdp.py recipes/verify.py", "go together: the ranks hold different shards"),
        ("by_hand/regroup.py recipes/verify.py", "is started in a way of its own"),
        ("recipes/evaluate.py preemptible.py --check", "the judge of make check knows no recipes"),
        ("recipes/evaluate.py recipes/verify.py -o {folder} --force", "is a folder, or one of the"),
        ("recipes/evaluate.py recipes/verify.py -o {folder}/bad.py", "bad.py exists: name another"),
        ("recipes/evaluate.py recipes/verify.py -o {folder}/no/x.py", "No such file or directory"),
        ("multinode.py recipes/fsdp.py --base multinode.py", "multinode.py is of the series: --"),
        ("{folder}/bad.py recipes/fsdp.py --base no.py", "--base no.py is not of the series"),
        ("{folder}/no.py recipes/fsdp.py --base multinode.py", "there is no file "),
        ("{folder}/bad.py recipes/fsdp.py --base multinode.py", "bad.py: '(' was never closed"),
        ("{folder}/zip.py recipes/fsdp.py --base multinode.py", "zip.py: 'utf-8' codec can't deco"),
        ("{folder}/bad.py --upgrade --base multinode.py", "takes one script of yours, and --base"),
        ("{folder}/bad.py --upgrade --base multinode.py@no", "git knows no such revision, nor"),
        ("{folder}/bad.py --upgrade --base multinode.py@HEAD", "bad.py: '(' was never closed"),
        ("{folder}/bad.py --base multinode.py@HEAD", "multinode.py@HEAD is not of the series"),
        # What is in the base counts as well.
        ("{folder}/bad.py recipes/verify.py --base recipes/fsdp.py", "do not go together: the ran"),
    ],
)
def test_bad_choice(tmp_path, arguments, error):
    (tmp_path / "bad.py").write_text("print(\n")
    (tmp_path / "zip.py").write_bytes(b"PK\xff")
    before = sorted(tmp_path.rglob("*"))
    if " -o " not in arguments:
        arguments += " -o {folder}/out.py"
    result = compose_in(tmp_path, arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("compose: ") and error in line
    assert sorted(tmp_path.rglob("*")) == before


CLIP = "        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)"


def test_conflict(tmp_path):
    """Marked as git marks it; --force replaces the file; lines end as they did in one's own."""
    text = (ROOT / "multinode.py").read_text()
    text = text.replace("loss.backward()\n", f"loss.backward()\n{CLIP}\n")
    (tmp_path / "own.py").write_text(text, newline="\r\n")
    arguments = "{folder}/own.py recipes/mixed_precision.py --base multinode.py -o {folder}/out.py"
    for more in ("", " --force"):
        result = compose_in(tmp_path, arguments + more)
        assert result.returncode == 1 and "out.py has conflicts, marked as git" in result.stderr
    lines = (tmp_path / "out.py").read_bytes().decode().split("\r\n")
    assert "\n" not in "".join(lines)
    (start,) = [n for n, line in enumerate(lines) if line.startswith("<<<<<<< ")]
    (end,) = [n for n, line in enumerate(lines) if line.startswith(">>>>>>> ")]
    base, separator = lines.index("||||||| before"), lines.index("=======")
    assert lines[start].endswith("own.py") and lines[end].endswith("mixed_precision.py")
    assert "\n".join(lines[start + 1 : base]) in text and CLIP in lines[start:base]
    assert "\n".join(lines[base + 1 : separator]) in (ROOT / "multinode.py").read_text()
    recipe = (ROOT / "recipes" / "mixed_precision.py").read_text()
    assert "\n".join(lines[separator + 1 : end]) in recipe


BATCH = "        self.total_loss += loss.detach() * len(inputs)\n"
STATE = """            "optimizer": self.optimizer.state_dict(),\n"""
SAVED = """        self._log(f"{trained} | loss {self.loss:.4g} | saved {path}")\n"""


@pytest.mark.parametrize(
    "files, old, new, problem",
    [  # a copy of the first file, in which a reader has changed a line, and another file
        (
            "multinode.py preemptible.py",
            BATCH,
            f"{BATCH}        self.steps = 1\n",
            "attribute Trainer.steps is of both: {own} and preemptible.py",
        ),
        (
            "multinode.py recipes/tensorboard_logging.py",
            BATCH,
            f"{BATCH}\n    def _log_metrics(self):\n        print(self.loss)\n",
            "method Trainer._log_metrics is of both: {own} and recipes/tensorboard_logging.py",
        ),
        (
            "multinode.py elastic_ddp.py",
            "    args = parser.parse_args()\n",
            "    parser.add_argument('--timeout')\n    args = parser.parse_args()\n",
            "argument --timeout is of both: {own} and elastic_ddp.py",
        ),
        (
            "multinode.py elastic_ddp.py",
            BATCH,
            f"{BATCH}        print(self.args.batch_size)\n",
            "args.batch_size is used, and no argument",
        ),
        (
            "elastic_ddp.py recipes/save_after_failure.py",
            '"epochs_run"',
            '"epochs"',
            "snapshot['epochs_run'] is read, and not saved",
        ),
        (
            "elastic_ddp.py recipes/save_after_failure.py",
            "local_rank",
            "gpu",
            "Undefined name `local_rank`",
        ),
        (
            "multinode.py preemptible.py",
            "        pin_memory=",
            "        worker_init_fn=print,\n        pin_memory=",
            ": keyword argument repeated: worker_init_fn: there the parts do not fit",
        ),
        (
            "gpt/metrics.py gpt/dcp.py",
            SAVED,
            f"{SAVED}        print('saved')\n",
            "behind a return, and never runs: print('saved')",
        ),
        (
            "gpt/pretrain.py gpt/dcp.py",
            STATE,
            f'{STATE}            "second": self.second.state_dict(),\n',
            "look at _save_snapshot of {own}, since gpt/dcp.py saves in another way: "
            '"second": self.second.state_dict(),',
        ),
        (
            "recipes/gradient_accumulation.py recipes/evaluate.py",
            "    Trainer(model,",
            "    # mine\n    Trainer(model,",
            "",
        ),
    ],
)
def test_names(tmp_path, files, old, new, problem):
    """What is no conflict of lines, but one of names or places, is told in a line each."""
    base, part = files.split()
    text = (ROOT / base).read_text()
    assert old in text
    own = tmp_path / "own.py"
    own.write_text(text.replace(old, new))
    result = compose_in(tmp_path, f"{own} {part} --base {base} -o {{folder}}/out.py")
    if problem:
        assert result.returncode == 1
        assert problem.format(own=own) in result.stderr
        assert all(line.startswith(f"{tmp_path}/out.py") for line in result.stderr.splitlines())
    else:
        assert (result.returncode, result.stderr) == (0, "")


def indent(line):
    return len(line) - len(line.lstrip())


def step_lines(file):
    """Returns the lines of the methods that train a batch and an epoch."""
    method = r"^    def _run_(?:batch|epoch)\(.*?(?=\n\n)"
    found = re.findall(method, (ROOT / file).read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(found).splitlines()


@pytest.mark.long
def test_own_lines():
    """Between any two lines of a step, one's own conflict, or stay between the same ones."""
    conflicts, count = set(), 0
    for part, base in BASES.items():
        old, new = step_lines(base), step_lines(part)
        for n in range(1, len(old)):
            depth = indent(old[n])
            if depth == 4:  # that of the methods
                continue
            own = [" " * depth + "if own:", " " * depth + "    own()"]
            sides = (old, [*old[:n], *own, *old[n:]], new)
            sides = ([(line, None) for line in side] for side in sides)
            merged = [line for line, _ in merge(*sides, lambda *_: [("<<<<<<<", None)])]
            count += 1
            if "<<<<<<<" in merged:
                conflicts.add((part, old[n - 1].strip()))
                continue
            start = merged.index(own[0])
            assert merged == [*new[:start], *own, *new[start:]]
            assert merged[start - 1] == old[n - 1] or merged[start + 2] == old[n]
            assert indent(merged[start + 2]) <= depth  # it takes in no other line
            ast.parse("\n".join(["class Trainer:", *merged]))
    print(f"{count} insertions:", *sorted(conflicts), sep="\n")
    assert ("recipes/mixed_precision.py", "loss.backward()") in conflicts
    assert len(conflicts) < count / 100  # or all would do


@pytest.mark.long
@pytest.mark.parametrize(
    "parts, checks",
    first(
        1,
        [
            ("gpt/async_save.py gpt/tensor_parallel.py", 8),
            ("preemptible.py recipes/tensorboard_logging.py", 20),
        ],
    ),
)
def test_checked(tmp_path, parts, checks):
    result = compose_in(tmp_path, f"{parts} -o {{folder}}/out.py --check")
    assert result.returncode == 0, result.stdout
    assert f"proven: {' + '.join(parts.split())}" in result.stdout
    assert "FAIL" not in result.stdout and result.stdout.count("  ok  ") == checks


OWN_MODEL = """class MyModel(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))


"""


def with_own_model(text):
    """Returns a script with another model, data and optimizer."""
    text = re.sub(r"class ToyModel.*?\n\n\n", OWN_MODEL, text, flags=re.DOTALL)
    # Three lines in a row, between which evaluate.py adds some.
    text = text.replace("ToyModel", "MyModel").replace("ToyDataset(2048)", "ToyDataset(1600)")
    sgd = "SGD(model.parameters(), lr=0.01, momentum=0.9)"
    assert sgd in text
    return text.replace(sgd, "AdamW(model.parameters())")


def test_own_script(shell):
    """With another model, data and optimizer, it takes three recipes and two stages in turn."""
    (shell.folder / "0.py").write_text(with_own_model((ROOT / "multinode.py").read_text()))
    bases = {
        "recipes/evaluate.py": "multinode.py",
        "recipes/tensorboard_logging.py": "multinode.py",
        "resumable.py": "multinode.py",
        "preemptible.py": "resumable.py",
        "recipes/profiler.py": "preemptible.py",
    }
    for n, (part, base) in enumerate(bases.items()):
        arguments = f"{{folder}}/{n}.py {part} --base {base} -o {{folder}}/{n + 1}.py"
        result = compose_in(shell.folder, arguments)
        assert result.returncode == 0, result.stderr
    composed = (shell.folder / "5.py").read_text()
    assert OWN_MODEL in composed and "(1600)" in composed and "AdamW(" in composed
    script = patch(shell.folder, shell.folder / "5.py", SIGNAL, "signalled.py")
    command = f"{script} 2 1 --batch_size 32"
    shell.ranks(command, 2, SIGNAL="15", SIGNAL_AT="1 320").fails("stopped by a signal")
    output = shell.ranks(command, 2).succeeds()
    assert "val loss" in output and curves(shell.folder / "snapshot.pt.logs")
    # It has trained as on one rank with the first recipe alone.
    shell.ranks(f"{shell.folder}/1.py 2 1 --batch_size 64 --snapshot_path one").succeeds()
    weights, expected = (load_gpt(shell.folder / path)["model"] for path in ("snapshot.pt", "one"))
    assert max_abs_diff(weights.values(), expected.values()) < 1e-5


@pytest.mark.parametrize("order", first(2, [*map("".join, itertools.permutations("012"))], LONG))
def test_own_script_in_each_order(tmp_path, order):
    """Three that change the same lines, taken one after another, have the lines of all at once."""
    parts = ["elastic_ddp.py", *MIXED_AND_ACCUMULATED]
    (tmp_path / "0.py").write_text(with_own_model((ROOT / "multinode.py").read_text()))
    base = "multinode.py"
    for n, part in enumerate(parts[int(index)] for index in order):
        arguments = f"{{folder}}/{n}.py {part} --base {base} -o {{folder}}/{n + 1}.py"
        result = compose_in(tmp_path, arguments)
        assert result.returncode == 0, result.stderr
        base = part if part in STAGES else base
    composed = (tmp_path / "3.py").read_text()
    expected = "\n".join(line for line, _ in compose(parts, "3.py"))
    step = re.search(r"    def _run_batch.*?\n\n", expected, re.DOTALL)[0]
    assert step in composed and OWN_MODEL in composed


# What changes in multinode.py after a copy was made.
SINCE = [
    (
        "        self.loss_fn = loss_fn\n",
        "        self.loss_fn = loss_fn\n        self.name = 'b'\n",
    ),
    ("lower the learning rate?", "is the learning rate too high?"),
    ("        progress.set_postfix(loss", "        progress.set_postfix(mean_loss"),
]


def upgrade(copy, version, own, changes):
    """Returns what the command says of a copy, after `changes` in the file that it was made of."""
    (copy / "own.py").write_text(own)
    for old, new in changes:
        edit(copy / "multinode.py", old, new)
    arguments = ["own.py", "--upgrade", "--base", f"multinode.py@{version}"]
    return run(sys.executable, "-m", "tools.compose", *arguments, folder=copy)


@pytest.mark.parametrize("version", ["HEAD", "1.0"])
def test_upgrade(copy, version):
    """A copy of an old version gets what has changed since, and keeps what was changed in it."""
    (copy / "CHANGELOG.md").write_text("# Changes\n\n## 1.0 (today)\n")
    assert run("git", "add", ".", folder=copy).returncode == 0
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    assert run("git", *author, "commit", "-qm", "1.0", folder=copy).returncode == 0
    own = with_own_model((copy / "multinode.py").read_text())
    result = upgrade(copy, version, own, SINCE)
    assert result.returncode == 0, result.stderr
    upgraded = (copy / "own_upgraded.py").read_text()
    new = with_own_model((copy / "multinode.py").read_text())
    assert upgraded.partition("\nimport")[2] == new.partition("\nimport")[2]
    assert all(changed in upgraded for _, changed in SINCE)


def test_upgrade_of_an_older_copy(copy):
    """It is noticed that not the named version was copied, which has nothing to bring."""
    own = with_own_model((copy / "multinode.py").read_text())
    assert "nearer" not in upgrade(copy, "HEAD", own, ()).stdout
    edit(copy / "multinode.py", *SINCE[1])
    author = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    assert run("git", *author, "commit", "-qam", "changed", folder=copy).returncode == 0
    (copy / "own_upgraded.py").unlink()
    result = upgrade(copy, "HEAD", own, ())
    first = run("git", "rev-list", "--max-parents=0", "--abbrev-commit", "HEAD", folder=copy).stdout
    assert "multinode.py has 0 changed lines since HEAD" in result.stdout
    nearer = "own.py is nearer to another version: is it a copy of multinode.py@"
    assert f"{nearer}{first.strip()}?" in result.stdout


@pytest.mark.parametrize("name", ["recipes/regroup.py", "by_hand/regroup.py"])
def test_upgrade_of_a_file_that_has_moved(copy, name):
    """A copy from before finds its old text by the old name and by the new one."""
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for command in ("mv by_hand/regroup.py recipes", "commit -qm old"):
        assert run(*git, *command.split(), folder=copy).returncode == 0
    own = with_own_model((copy / "recipes/regroup.py").read_text())
    (copy / "own.py").write_text(own)
    assert run(*git, "mv", "recipes/regroup.py", "by_hand", folder=copy).returncode == 0
    edit(copy / "by_hand/regroup.py", *SINCE[1])
    assert run(*git, "commit", "-qam", "moved", folder=copy).returncode == 0
    arguments = ["own.py", "--upgrade", "--base", f"{name}@HEAD^"]
    result = run(sys.executable, "-m", "tools.compose", *arguments, folder=copy)
    assert result.returncode == 0, result.stderr
    assert "by_hand/regroup.py has 2 changed lines since HEAD^" in result.stdout
    assert "nearer" not in result.stdout
    new = with_own_model((copy / "by_hand/regroup.py").read_text())
    assert (copy / "own_upgraded.py").read_text().partition("\nimport")[2] == new.partition(
        "\nimport"
    )[2]


def test_upgrade_in_conflict(copy):
    """Where both have changed a line, both texts stand in the script."""
    line = "torch.manual_seed(args.seed)"
    own = (copy / "multinode.py").read_text().replace(line, "torch.manual_seed(1)")
    result = upgrade(copy, "HEAD", own, [(line, "torch.manual_seed(2)")])
    assert result.returncode == 1 and "_upgraded.py has conflicts, marked as git" in result.stderr
    upgraded = (copy / "own_upgraded.py").read_text()
    conflict = upgraded.partition("<<<<<<< ")[2].partition("\n>>>>>>> multinode.py\n")[0]
    ours, old, theirs = re.split(r"\n\|{7} before\n|\n=======\n", conflict)
    assert line in old
    assert "manual_seed(1)" in ours and "manual_seed(2)" in theirs
