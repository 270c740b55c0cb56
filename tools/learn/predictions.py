"""The runs that answer the questions of exercises.txt."""

import contextlib
import re
import tempfile
import textwrap
from pathlib import Path

from rankcheck.launch.jobs import torchrun_variables
from rankcheck.launch.run import SILENCE_S

from tools.formulas.memory import GPT, memory
from tools.judge.checks import Judge, toy_task
from tools.judge.stages import STAGES
from tools.launch.snapshots import load
from tools.steps import ROOT


def show(run):
    print(textwrap.indent("\n".join(run.lines()), "  | "))
    return run


@contextlib.contextmanager
def trainer(stage, *edits, silence_s=SILENCE_S):
    """Yields a function that trains with a script, and shows and returns the run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(stage).name).with_suffix(".py")
        text = (ROOT / f"{stage}.py").read_text()
        for old, new in zip(edits[::2], edits[1::2], strict=True):
            text = text.replace(old, new)
        file.write_text(text)
        judge = Judge(STAGES[stage], file, toy_task, Path(folder))
        judge.forks = True
        judge.silence_s = silence_s
        try:
            yield lambda total, more="", **options: show(
                judge.run(total, "snapshot", more, **options)
            )
        finally:
            judge.shell.end_all()


def steps_per_epoch(run):
    return re.search(r"(\d+) steps per epoch", run.output)[1]


def compare(run, other):
    """Returns how the last logged loss of a run is beside that of another one."""
    loss, other_loss = ([*run.losses().values()][-1] for run in (run, other))
    return "equal" if loss == other_loss else "higher" if loss > other_loss else "lower"


def steps_of_one_process():
    with trainer("singlegpu") as train:
        return steps_per_epoch(train(1, "--batch_size 48"))


def steps_of_two_ranks():
    with trainer("multigpu") as train:
        return steps_per_epoch(train(1, "--batch_size 32"))


def loss_at_the_same_batch_size():
    with trainer("singlegpu") as train_one, trainer("multigpu") as train_two:
        one, two = (train(10, "--batch_size 32", save_every=10) for train in (train_one, train_two))
        return compare(two, one)


def samples_of_three_ranks():
    with trainer("multigpu_torchrun") as train:
        return str(sum(map(len, train(1, nodes=["."] * 3).batches())))


def ranks_that_wait():
    backward = "        loss.backward()\n"
    barrier = f"        if dist.get_rank() == 1:\n            dist.barrier()\n{backward}"
    with trainer("multigpu_torchrun", backward, barrier, silence_s=4) as train:
        waiting = re.findall(r"Rank (\d).*", train(1).hangs)
    return "both" if len(waiting) == 2 else waiting[0]


def steps_when_resumed_on_four_ranks():
    with trainer("multigpu_torchrun") as train:
        train(1, "--batch_size 32")
        return steps_per_epoch(train(2, "--batch_size 32", nodes=["."] * 4))


def epoch_after_a_kill():
    with trainer("multigpu_torchrun") as train:
        epoch_steps = int(steps_per_epoch(train(4, save_every=4)))
        train(10, save_every=4, rank=1, step=3 * epoch_steps + 5, signal=9)
        return re.search(r"(\d+) of 10 epochs", train(10, save_every=4).output)[1]


def local_rank_of_rank_six():
    return torchrun_variables(6, ["node1"] * 4 + ["node2"] * 4)["LOCAL_RANK"]


def start_without_a_snapshot():
    with trainer("multinode") as train:
        train(1, nodes=["node1", "node1"])
        run = train(2, nodes=["node1", "node2"])
        return "wait" if run.hangs else "train" if run.steps else "end"


def steps_repeated():
    with trainer("resumable") as train:
        killed = train(1, "--save_every_steps 10", rank=0, step=27, signal=9)
        resumed = train(1, "--save_every_steps 10")
        return str(27 + len(resumed.steps[0]) - int(steps_per_epoch(killed)))


def steps_after_a_signal():
    with trainer("preemptible") as train:
        rank_0, rank_1 = train(1, rank=0, step=20, signal=15, step_s=1).steps
        return str(len(rank_1) - len(rank_0))


def samples_of_rank_two():
    with trainer("elastic_ddp") as train:
        run = train(1, "--global_batch_size 64", nodes=["."] * 3)
        return str(len(run.steps[2][0]["samples"]))


def loss_on_three_ranks():
    with trainer("elastic_ddp") as train_three, trainer("elastic_ddp") as train_one:
        three, one = train_three(3, nodes=["."] * 3), train_one(3, nodes=["."])
        return compare(three, one)


def type_of_the_saved_weights():
    with trainer("recipes/mixed_precision") as train:
        run = train(1)
        (dtype,) = {w.dtype for w in load(run.folder.parent / "snapshot")["model"].values()}
        return str(dtype).removeprefix("torch.")


def numbers_in_the_optimizer():
    with trainer("by_hand/zero") as train:
        return str(train(1).steps[0][0]["held"])


def gigabytes_of_a_rank():
    model = GPT(8e9, n_layer=32, n_embd=4096, vocab_size=128256, context=8192)
    parts = memory(model, samples=1, number_bytes=2, shards=8)
    return f"{(parts['weights'] + parts['gradients'] + parts['optimizer']) / 1e9:.0f}"
