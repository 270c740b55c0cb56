"""What the files of gpt/ claim; and that all of them, as the stages do, resume where they stopped.

What test_gpt_sharded.py adds is about shards.
"""

import importlib
import re
import signal
from textwrap import indent

import pytest
import torch
from gpt_helpers import OPTIONS, TINY, write_tokens
from helpers import (
    CLOCK,
    LOG_LOSSES,
    PLAIN_SGD,
    SHORT_GPT,
    SHORT_VAL,
    SIGNAL,
    VAL_CHUNKS,
    assert_equal,
    curves,
    fences,
    gpt_config,
    logged_losses,
    long,
    patch,
)
from torch.nn import functional

from tools.launch.snapshots import load, load_gpt, max_abs_diff, write_text
from tools.steps import ROOT

# Of the others, tools/chain/every_kill.py and the judge prove the ways to stop and resume.
WITH_SNAPSHOTS_OF_THEIR_OWN = ["gpt/gpt.py", *long("gpt/local_sgd.py", "gpt/dcp.py")]
BATCH_SIZE = 16  # of all ranks together
SIZE = 182  # chunks: 11 global batches of 16 and one of 6


def tiny_options(shell, name):
    """Returns options for a tiny GPT, on a text of `SIZE` chunks to train on."""
    val_chunks, val_options = (0, "") if name == "gpt/gpt.py" else (VAL_CHUNKS, SHORT_VAL)
    write_text(shell.folder / "text", SIZE + val_chunks, 8)
    options = f"{TINY} {val_options} --batch_size {BATCH_SIZE // 2} {OPTIONS.get(name, '')}"
    return f"{options} --text {shell.folder}/text --snapshot_path {shell.folder}"


# Tells whether a snapshot's weights are still in its file when the model takes them.
PRINT_MAPPED = """
@before(script.GPT, "load_state_dict")
def print_mapped(self, state):
    print("mapped:", "/resumed" in script.Path("/proc/self/maps").read_text())
"""


@pytest.mark.parametrize("name", WITH_SNAPSHOTS_OF_THEIR_OWN)
def test_killed_and_stopped_is_uninterrupted(shell, name):
    """Two ranks, killed in mid-epoch, then stopped in mid-epoch, end as two that are left alone.

    Bit for bit; and each snapshot has the same loss, to 1e-6: it adds the same numbers otherwise.
    """
    script = patch(shell.folder, name, SHORT_GPT + LOG_LOSSES + SIGNAL + PRINT_MAPPED)
    command = f"{script} 2 1 --save_every_steps {{}} {tiny_options(shell, name)}/{{}}"
    nodes = ("node1", "node2") if name == "gpt/local_sgd.py" else ("node", "node")
    nodes = [shell.folder / node for node in nodes]
    uninterrupted = shell.ranks_on(nodes, command.format(5, "uninterrupted"))

    kill = {"SIGNAL": str(int(signal.SIGKILL)), "SIGNAL_AT": f"0 {11 * BATCH_SIZE}"}
    killed = shell.ranks_on(nodes, command.format(5, "resumed"), **kill)
    assert killed.wait() == -signal.SIGKILL
    saved = load_gpt(shell.folder / "resumed")["samples_run"]
    assert saved in (5 * BATCH_SIZE, 10 * BATCH_SIZE)

    stop = {"SIGNAL": str(int(signal.SIGHUP)), "SIGNAL_AT": f"1 {2 * BATCH_SIZE}"}
    stopped = shell.ranks_on(nodes, command.format(1000, "resumed"), **stop)
    stopped.fails("stopped by a signal")
    samples = saved - 2 * BATCH_SIZE  # at the tenth step; an epoch has twelve
    assert f"epoch 1 + {samples} samples | " in stopped.output
    snapshot = load_gpt(shell.folder / "resumed")
    assert (snapshot["epochs_run"], snapshot["samples_run"]) == (1, samples)

    resumed = shell.ranks_on(nodes, command.format(1000, "resumed"))
    assert "1 of 2 epochs done" in resumed.succeeds()
    assert resumed.output.count("mapped: True") == (2 if name == "gpt/gpt.py" else 0)
    losses = logged_losses(uninterrupted.succeeds())
    for output in (killed.output, stopped.output, resumed.output):
        found = logged_losses(output)
        assert found == pytest.approx({at: losses[at] for at in found}, rel=1e-6)
    assert load_gpt(shell.folder / "resumed")["epochs_run"] == 2
    assert_equal(shell.folder / "uninterrupted", shell.folder / "resumed")


@pytest.mark.parametrize("name", ["gpt/gpt.py", "gpt/dcp.py"])
def test_snapshot_of_another_shape(shell, name):
    """Other heads have weights of the same sizes, and DCP would load only the first layers."""
    command = f"{patch(shell.folder, name, SHORT_GPT)} 1 {tiny_options(shell, name)}/s --n_layer 2"
    shell.ranks(command).succeeds()
    for option, size in [("--n_layer", 1), ("--n_head", 4), ("--context", 4)]:
        job = shell.ranks(f"{command} {option} {size}")
        job.fails("cannot load ", ": move it or set another --snapshot_path")
        saved, other = re.search(r"saved by a model of (.*), not (.*)'", job.output).groups()
        assert saved == "n_layer=2, n_head=2, n_embd=16, context=8"
        sizes = re.sub(rf"{option[2:]}=\d", f"{option[2:]}={size}", saved)
        assert other == sizes


def test_text_is_not_loaded(tmp_path):
    """It is read chunk by chunk; this file is sparse, and takes no disk."""
    with open(tmp_path / "text", "wb") as file:
        file.truncate(2**40)
    dataset = importlib.import_module("gpt.gpt").TextDataset(tmp_path / "text", 64)
    assert [chunk.tolist() for chunk in dataset[2**33]] == [[0] * 64] * 2


@pytest.mark.parametrize("name", ["gpt/gpt.py", "gpt/tokens.py"])
def test_generated_text_is_printable(shell, name):
    """No control character reaches the terminal, or makes a log binary."""
    setup = "script.GPT.generate = lambda *arguments: 'gr\\x1b[2Jün\\0\\r\\n\ufffd\\x9b\\u202e!'"
    options = tiny_options(shell, name)
    if name == "gpt/tokens.py":
        write_tokens(shell.folder / "tokens", SIZE + VAL_CHUNKS, 8)
        options = options.replace(f"--text {shell.folder}/text", f"--data {shell.folder}/tokens")
    script = patch(shell.folder, name, setup)
    output = shell.ranks(f"{script} 1 {options}/s --generate 4", 2).succeeds()
    assert output.endswith("\ngr[2Jün\n\ufffd!\n")


# Each rank is killed after this evaluation, as if it had failed; a save takes a second.
FAIL_TO_EVALUATE = """
@after(script.Trainer, "_evaluate")
def fail(self):
    if os.environ.get("FAIL_AT") == f"{self.epochs_run} {self.samples_run}":
        os._exit(1)
if hasattr(script, "dcp"):
    @before(script.dcp.FileSystemWriter, "finish")
    def take_a_second(*arguments, **options):
        time.sleep(1)
"""


@pytest.mark.parametrize("name", ["gpt/schedule.py", *long("gpt/async_save.py")])
def test_evaluation_that_fails(shell, name):
    """The save comes first, so that no step is lost; the evaluation comes again at the start."""
    script = patch(shell.folder, name, SHORT_GPT + FAIL_TO_EVALUATE)
    options = tiny_options(shell, name)
    command = f"{script} 1 1 --save_every_steps 5 --eval_every_steps 5 {options}"
    val_losses = []
    for run, fail_at in [("whole", ""), ("s", "0 80"), ("s", "1 0"), ("s", "")]:
        job = shell.ranks(f"{command}/{run}", 2, FAIL_AT=fail_at)
        assert (job.wait() != 0) == bool(fail_at), job.output
        val_losses.append(re.findall(r"val loss (\S+)", job.output))
        saved = load_gpt(shell.folder / run)
        assert f"{saved['epochs_run']} {saved['samples_run']}" == (fail_at or "1 0")
    assert "nothing left to train" in job.output
    assert job.output.count("1,456 tokens to train on, 96 to validate on, 1 in neither") == 1
    whole, *rest = val_losses
    assert len(set(whole)) == 3 and rest == [whole[:1], whole, whole[2:]]


SONG = "nine green bottles hanging on the wall\n"


def test_pretrained_gpt(shell):
    """On 2 ranks: it learns the song, and its val loss, throughput and MFU are as computed here.

    Finished, it evaluates another text.
    """
    (shell.folder / "song.txt").write_text(SONG * 3000)
    script = patch(shell.folder, "gpt/pretrain.py", CLOCK)
    options = "--n_layer 1 --n_head 1 --n_embd 64 --context 32 --text song.txt --val_tokens 32768"
    options += " --batch_size 8 --learning_rate 3e-3 --peak_tflops 0.001"
    options += " --save_every_steps 60 --eval_every_steps 100"
    output = shell.ranks(f"{script} 1 {options}", 2).succeeds()
    assert "84,224 tokens to train on, 32,768 to validate on, 8 in neither" in output
    val_losses = [float(loss) for loss in re.findall(r"val loss (\S+)", output)]
    assert len(val_losses) == 2 and val_losses[-1] < 0.5
    assert "bottles" in output.rpartition("MFU")[2]
    # The speeds of ten steps each; and of all 165, with three snapshots and two evaluations.
    *speeds, overall = [float(s.replace(",", "")) for s in re.findall(r"(\S+) tokens/s", output)]
    seconds = [sum(range(n, n + 10)) / 1000 for n in range(1, 161, 10)]
    assert speeds == pytest.approx([512 * 10 / s for s in seconds], rel=1e-3)
    assert overall == pytest.approx(512 * 164.5 / (165 * 166 / 2000 + 5), rel=1e-3)
    model = importlib.import_module("gpt.pretrain").GPT(gpt_config(1, 1, 64, 32))
    mfu = speeds[-1] * model.flops_per_token / 2 / 0.001e12
    found = re.findall(r"MFU (\S+)%", output)[-2]
    assert float(found) / 100 == pytest.approx(mfu, abs=1e-3)
    model.load_state_dict(load(shell.folder / "snapshot.pt")["model"])
    (shell.folder / "other.txt").write_text(SONG.replace("nine", "ten") * 3000)
    (shell.folder / "short.txt").write_text(SONG[:20])
    output = shell.ranks(f"{script} 1 {options} --text other.txt short.txt", 2).succeeds()
    assert "97,600 tokens to train on, 16,384 to validate on, 36 in neither" in output
    val_losses += [float(re.search(r"val loss (\S+)", output)[1])]
    # The last snapshot's loss on the last chunks of 32 bytes, computed here.
    for name, size, val_loss in [("song", 1024, val_losses[1]), ("other", 512, val_losses[2])]:
        text = torch.tensor(list((shell.folder / f"{name}.txt").read_bytes()))
        end = (len(text) - 1) // 32 * 32
        start = end - size * 32
        chunks = text[start:end].view(size, 32), text[start + 1 : end + 1].view(size, 32)
        with torch.no_grad():
            loss = functional.cross_entropy(model(chunks[0]).flatten(0, 1), chunks[1].flatten())
        assert val_loss == pytest.approx(loss.item(), rel=1e-3)


@pytest.mark.parametrize("name", ["gpt", "pretrain"])
def test_gpt_sees_no_byte_ahead(name):
    model = importlib.import_module(f"gpt.{name}").GPT(gpt_config(2, 2, 32, 16))
    model.init_weights(seed=0)
    text = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    other = text.clone()
    other[0, 9:] = 0
    with torch.no_grad():
        difference = (model(text) - model(other)).abs().amax(2)[0]
    assert (difference[:9] < 1e-6).all() and (difference[9:] > 1e-3).all()


def test_compressed_is_close(shell):
    """float16 gradients change the weights, a little; without --compress, nothing changes."""
    results = []
    write_text(shell.folder / "text", SIZE + VAL_CHUNKS, 8)
    options = f"1 {TINY} {SHORT_VAL} --batch_size 8 --text text --learning_rate 0.1"
    for name, option in [
        ("gpt/pretrain.py", ""),
        ("gpt/slow_network.py", "--bucket_cap_mb 1"),
        ("gpt/slow_network.py", "--compress"),
    ]:
        script = patch(shell.folder, name, SHORT_GPT + PLAIN_SGD)
        path = shell.folder / f"{len(results)}.pt"
        shell.ranks(f"{script} {options} {option} --snapshot_path {path}", 2).succeeds()
        results.append(load(path)["model"].values())
    plain, uncompressed, compressed = results
    assert max_abs_diff(plain, uncompressed) == 0
    assert 0 < max_abs_diff(plain, compressed) < 1e-3


def test_gradient_beyond_float16(shell):
    """The run stops before the step that would make every weight NaN."""
    write_text(shell.folder / "text", SIZE + VAL_CHUNKS, 8)
    large_loss = "loss = script.next_byte_loss\nscript.next_byte_loss = lambda *x: 1e9 * loss(*x)"
    script = patch(shell.folder, "gpt/slow_network.py", SHORT_GPT + large_loss)
    job = shell.ranks(f"{script} 1 {TINY} {SHORT_VAL} --batch_size 8 --text text --compress", 2)
    job.fails("the gradient of step 1 is nan or inf")
    assert not (shell.folder / "snapshot.pt").exists()


def test_logged_steps(shell):
    """Losses are means over all samples, of all ranks; the norm is that of one rank's gradient."""
    write_text(shell.folder / "text", SIZE + VAL_CHUNKS, 8)
    steps = []
    for ranks in (1, 2):
        script = patch(shell.folder, "gpt/metrics.py", SHORT_GPT)
        options = f"1 {TINY} {SHORT_VAL} --text text --batch_size {16 // ranks} --log_every_steps 1"
        output = shell.ranks(f"{script} {options} --snapshot_path {ranks}.pt", ranks).succeeds()
        found = re.findall(
            r"step (\d+) \| loss (\S+) \| grad norm (\S+) \| lr (\S+)$", output, re.M
        )
        steps.append([[float(value) for value in step] for step in found])
    assert steps[1] == [pytest.approx(step, rel=2e-3) for step in steps[0]]
    numbers, losses, *_ = zip(*steps[1], strict=True)
    assert numbers == (*range(1, 13),)
    total = sum(loss * min(16, SIZE - 16 * step) for step, loss in enumerate(losses))
    assert load(shell.folder / "2.pt")["loss"] == pytest.approx(total / SIZE, rel=1e-3)


@pytest.mark.parametrize("name", ["gpt/metrics.py", *long("gpt/fsdp.py")])
def test_tensorboard(shell, name):
    """The lines of the page, in their places: a run that is killed and resumed has one curve."""
    write_text(shell.folder / "text", SIZE + VAL_CHUNKS, 8)
    (shown,) = fences("gpt/metrics.md", "python")
    imported, at_start, at_end = re.split(r"\n# in .*:\n", shown)
    source = (ROOT / name).read_text()
    source = source.replace("import torch\n", f"import torch\n{imported}\n", 1)
    for line, added in [
        (r"(?=\n    def _request_stop\()", at_start),
        (r'        self\._log\(f"step .* \| {numbers}.*\n', at_end),
    ]:
        source, count = re.subn(line, rf"\g<0>{indent(added.strip(), ' ' * 8)}\n", source)
        assert count == 1
    own = shell.folder / "own.py"
    own.write_text(source)
    script = patch(shell.folder, own, SHORT_GPT + SIGNAL, "patched.py")
    command = f"{script} 1 {TINY} {SHORT_VAL} --text text --batch_size 8 --log_every_steps 2"
    kill = {"SIGNAL": str(int(signal.SIGKILL)), "SIGNAL_AT": f"0 {7 * BATCH_SIZE}"}
    assert shell.ranks(f"{command} --save_every_steps 3", 2, **kill).wait() != 0
    output = shell.ranks(command, 2).succeeds()
    assert "step 8 " in output
    (logs,) = shell.folder.glob("snapshot*.logs")
    assert [step for step, _ in curves(logs)["loss"]] == [2, 4, 6, 8, 10, 12]


# Of rank 1, in the fourth step: the loss stays finite.
BAD_GRADIENT = """
loss_fn = script.next_byte_loss
def loss_of_bad_gradient(logits, targets):
    if logits.requires_grad and script.dist.get_rank() == 1 and trained == [48]:
        logits.register_hook(lambda gradient: gradient * float('nan'))
    return loss_fn(logits, targets)
script.next_byte_loss = loss_of_bad_gradient
trained = []
@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    trained[:] = [self.samples_run]
"""
# Leaves out the fourth step, in its own way.
UNDO_STEP = """
import copy
@before(script.Trainer, "_run_batch")
def remember(self, inputs, targets):
    self.before = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])
@after(script.Trainer, "_run_batch")
def undo(self, inputs, targets):
    if self.samples_run == 64:
        self.model.load_state_dict(self.before[0])
        self.optimizer.load_state_dict(self.before[1])
"""


@pytest.mark.parametrize("name", ["gpt/metrics.py", "gpt/fsdp.py"])
def test_gradient_that_is_nan(shell, name):
    """All ranks end, and say of which step it was; --skip_steps goes past it."""
    write_text(shell.folder / "text", SIZE + VAL_CHUNKS, 8)
    float64 = f"{SHORT_GPT}torch.set_default_dtype(torch.float64)\n"
    float64 += "torch.Tensor.float = torch.Tensor.double\n"
    script = patch(shell.folder, name, float64 + SIGNAL + BAD_GRADIENT)
    options = f"1 {TINY} {SHORT_VAL} --text text --save_every_steps 3 --snapshot_path"
    command = f"{script} {options} s --batch_size 8"
    job = shell.ranks(command, 2)
    position = "--skip_steps 4 (after epoch 0 + 48 samples)"
    job.fails("the gradient of step 4 is nan or inf", f"or skip the batch: {position}")
    assert job.output.count("the gradient of step 4 ") == 2
    job = shell.ranks(f"{script} {options} new --batch_size 8 --save_every_steps 1000", 2)
    job.fails("the gradient of step 4 is nan or inf")
    assert "val loss" not in job.output  # the ranks do not train on to the end
    command += " --skip_steps 4 99"
    output = shell.ranks(command, 2).succeeds()
    assert "step 4 skipped" in output and "nan" not in output
    shell.ranks(command, 2).fails("--skip_steps [4]: 12 steps are done: name later ones")
    shell.ranks(command, 2, TORCHELASTIC_RESTART_COUNT="1").succeeds()
    script = patch(shell.folder, "gpt/metrics.py", float64 + UNDO_STEP)
    shell.ranks(f"{script} {options} undone.pt --batch_size 16", 1).succeeds()
    models = [load_gpt(shell.folder / path)["model"].values() for path in ("s", "undone.pt")]
    assert max_abs_diff(*models) < 1e-12
