"""The scripts of ports/: on two ranks as the script that they are made from, and resumed."""

import re
from typing import NamedTuple

import pytest
import torch
from helpers import (
    LONG,
    equal_snapshots,
    first,
    load,
    max_abs_diff,
    needs_slurm,
    patch,
    read_script,
)
from rankcheck.launch.jobs import free_port
from torch.utils.data import DataLoader

from ports import images_single
from tools.pages.fences import stripped, units

ORDER = read_script("order.py")
# It draws the noise of the k-th sample, and of those of its batch, from the seed k.
NOISE = f"""{ORDER}
drawn = 0
def seed(size):
    global drawn
    torch.manual_seed(drawn)
    drawn += size
"""
WEIGHTS = read_script("write_weights.py")
TENTH_STEP = read_script("tenth_step.py")
FAULT = TENTH_STEP + read_script("fault.py")
# Adam hides a constant factor of the gradients.
SGD = """
def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
torch.optim.Adam = torch.optim.AdamW = sgd
"""


class Port(NamedTuple):
    name: str  # of ports/NAME.py
    one: str  # the arguments of one process
    two: str  # those of each of two ranks that train the same
    faults: str  # as FAULT takes them, several
    setup: str = ""  # of both scripts
    equal_setup: str = ""  # of both, where they must train the same
    one_setup: str = ""  # with which the original draws the port's random numbers


PORTS = [
    Port(
        "images",
        "4 --batch_size 64",
        "4 --batch_size 32 --save_every 4",
        # 16 steps an epoch, which is saved after each fourth, as the best one, and at its end.
        "step 23 9, step 16 9 1, evaluation 60 9, save 11 9, saved 6 9, written 8 9, "
        "saved 10 9, step 23 15 1, step 16 15 1, evaluation 60 15 1, save 6 15",
        # BatchNorm, on CPUs, takes the samples of its own rank only.
        equal_setup="nn.BatchNorm2d = lambda channels: nn.GroupNorm(4, channels)",
        one_setup=f"""{ORDER}
@before(script.Images, "__getitem__")
def seed(self, index):
    script.random.seed(f"{{Order.epoch}} {{index}}")
""",
    ),
    Port(
        "recurrent",
        "4",
        "4",
        # 29 steps an epoch.
        "step 48 9, step 29 9 1, evaluation 7 9, save 7 9, written 9 9, saved 7 9, "
        "step 48 15 1, step 29 15 1, evaluation 7 15 1, save 7 15",
        # So that each epoch is worse: the rate falls, and the first one stays the best.
        setup="""
evaluate = script.evaluate
script.evaluate = lambda *arguments: -evaluate(*arguments)
""",
        # 8 steps an epoch.
        equal_setup="""
make_columns = script.make_columns
script.make_columns = lambda size, *arguments, **seed: make_columns(size // 4, *arguments, **seed)
""",
    ),
    Port(
        "text",
        "58 --eval_every 10 --batch_size 64",
        "58 --eval_every 10 --batch_size 32",
        # An epoch has 32 steps, an evaluation 32 forward passes.
        "step 33 9, step 32 9 1, evaluation 70 9, save 4 9, written 4 9, saved 4 9, "
        "step 33 15 1, evaluation 70 15 1, save 4 15",
        # 28 steps, of which an epoch has 8.
        equal_setup=f"""{SGD}
make_words = script.make_words
script.make_words = lambda size, seed: make_words(size // 4, seed)
sys.argv[1] = "28"
""",
        one_setup=ORDER,
    ),
    Port(
        "gan",
        "3 --batch_size 64",
        "3 --batch_size 32 --save_every 8",
        # An epoch has 32 steps of two optimizers each; rank 0 evaluates, in 6 forward passes.
        "step 75 9, step 64 9 1, evaluation 8 9, save 5 9, written 7 9, saved 5 9, "
        "saved 9 9, step 75 15 1, step 64 15 1, evaluation 8 15, save 5 15",
        equal_setup=SGD,
        one_setup=f"""{NOISE}
before(script, "draw_noise")(lambda size, device: seed(size))
""",
    ),
    Port(
        "vae",
        "3",
        "3",
        # An epoch has 17 steps, the last one of a single sample; rank 0 evaluates.
        "step 23 9, step 17 9 1, evaluation 10 9, save 4 9, written 7 9, saved 4 9, "
        "step 23 15 1, step 17 15 1, evaluation 10 15, save 4 15",
        equal_setup=SGD,
        one_setup=f"""{NOISE}
before(torch, "randn_like")(lambda mean: seed(len(mean)))
""",
    ),
]
BY_TIME = sorted(PORTS, key=lambda port: port.name == "recurrent")  # which takes the longest
EVERY_PORT = pytest.mark.parametrize("port", PORTS, ids=lambda port: port.name)


def epochs(output):
    """Returns what is logged of each epoch."""
    return re.findall(r"^(?:epoch|step) .*", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), first(1, [(torch.float64, 1e-12), (torch.float32, 1e-5)], LONG), ids=str
)
@EVERY_PORT
def test_two_ranks_train_as_the_original(shell, port, dtype, tolerance):
    """With half the batch size; and what they log of an epoch is the same."""
    one, two = shell.folder / "one", shell.folder / "two"
    setup = f"torch.set_default_dtype({dtype})\n{WEIGHTS}{port.setup}{port.equal_setup}\n"
    original = patch(shell.folder, f"ports/{port.name}_single.py", setup + port.one_setup)
    expected = shell.ranks_on([one], f"{original} {port.one}").succeeds()
    script = patch(shell.folder, f"ports/{port.name}.py", setup)
    output = shell.ranks_on([two] * 2, f"{script} {port.two}").succeeds()
    assert epochs(output) == epochs(expected) != []
    weights = [load(two / f"rank{rank}.weights") for rank in (0, 1)]
    assert equal_snapshots(*weights)
    assert (two / "snapshot.pt").exists()  # of the end
    assert max_abs_diff(weights[0], load(one / "rank0.weights")) < tolerance


@pytest.mark.long
@EVERY_PORT
def test_resumed_on_another_number_of_ranks(shell, port):
    """Killed on two ranks and resumed on four, a run ends with the weights of the original.

    All four must find the snapshot.
    """
    one, two, new = (shell.folder / name for name in ("one", "two", "new"))
    setup = f"torch.set_default_dtype(torch.float64)\n{WEIGHTS}{port.equal_setup}\n"
    original = patch(shell.folder, f"ports/{port.name}_single.py", setup + port.one_setup)
    shell.ranks_on([one], f"{original} {port.one}").succeeds()
    script = patch(shell.folder, f"ports/{port.name}.py", setup + FAULT)
    shell.ranks_on([two] * 2, f"{script} {port.two} --save_every 5", FAULT="step 23 9").wait()
    resume = f"{script} {port.two.replace('32', '16')}"
    shell.ranks_on([new, two, two, two], resume).fails("ranks start at", "share the disk")
    assert "resumes from" in shell.ranks_on([two] * 4, resume).succeeds()
    assert max_abs_diff(load(one / "rank0.weights"), load(two / "rank0.weights")) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("port", first(4, BY_TIME), ids=lambda port: port.name)
def test_resumed_bit_for_bit(shell, port):
    """Killed or terminated anywhere, a run ends with the files, and the log, of an unbroken one."""
    script = patch(shell.folder, f"ports/{port.name}.py", WEIGHTS + FAULT + port.setup)
    command = f"{script} --save_every 5 {port.two}"
    unbroken = shell.folder / "unbroken"
    expected = epochs(shell.ranks_on([unbroken] * 2, command).succeeds())
    for fault in port.faults.split(", "):
        folder = shell.folder / fault.replace(" ", "_")
        job = shell.ranks_on([folder] * 2, command, FAULT=fault)
        assert job.wait() != 0, f"nothing happened at {fault}"
        if " 15" in fault:  # both ranks stop, and only when the snapshot is complete
            _, _, end = job.output.rpartition("saved snapshot.pt")
            assert end.count("stopped by a signal") == 2, job.output
        output = shell.ranks_on([folder] * 2, command).succeeds()
        assert "resumes from" in output, fault
        assert epochs(output) == expected[-len(epochs(output)) :], fault
        for path in [*unbroken.glob("*.pt"), *unbroken.glob("*.weights")]:
            assert equal_snapshots(load(path), load(folder / path.name)), (fault, path.name)


@pytest.mark.parametrize(
    ("name", "arguments", "position"),
    first(
        1,
        [
            ("images", "1 --batch_size 32 --save_every 16", (0, 1000)),
            ("gan", "1 --batch_size 32 --save_every 32", (0, 2000)),
            ("recurrent", "1 --save_every 29", (0, 999)),
            ("vae", "1 --save_every 17", (0, 1025)),
        ],
    ),
)
def test_position_ends_with_the_data(shell, name, arguments, position):
    """Killed after the last step of an epoch, whose last global batch is smaller."""
    script = patch(shell.folder, f"ports/{name}.py", FAULT)
    assert shell.ranks(f"{script} {arguments}", world_size=2, FAULT="saved 1 9").wait() != 0
    assert load(shell.folder / "snapshot.pt")["position"] == position


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "begin", "resume"),
    first(1, [("text", "40 --batch_size 32", "80"), ("images", "1 --batch_size 32", "3")]),
)
def test_a_signal_is_seen_within_a_second(shell, name, begin, resume):
    """Of a resumed run, too, whose steps are counted from its start."""
    shell.ranks(f"ports/{name}.py {begin}", world_size=2).succeeds()
    script = patch(shell.folder, f"ports/{name}.py", read_script("slow_steps.py"))
    job = shell.ranks(f"{script} {resume} --batch_size 32", world_size=2)
    job.fails("stopped by a signal")
    assert 5 <= int(re.findall(r"(\d+) steps", job.output)[0]) <= 9


@needs_slurm
@pytest.mark.parametrize("port", first(0, PORTS), ids=lambda port: port.name)
def test_requeued_on_a_cluster(cluster, shell, port):
    """At the signal of a time limit the job saves, is requeued, and ends as an unbroken one."""
    unbroken = shell.folder / "unbroken"
    setup = port.setup + TENTH_STEP + read_script("reach.py")
    script = patch(shell.folder, f"ports/{port.name}.py", setup)
    usual = patch(shell.folder, f"ports/{port.name}.py", port.setup, name="usual.py")
    shell.ranks_on([unbroken] * 2, f"{usual} {port.two}").succeeds()
    stage = "elastic_ddp" if port.name == "vae" else "preemptible"
    options = "--parsable --nodes=2 --gpus-per-node=1"
    job = cluster(
        f"""
        job=$(sbatch {options} slurm/{stage}.sbatch {script.name} {port.two})
        until [ -e reached ]; do sleep 0.1; done
        scancel --signal=USR1 --batch $job
        """,
        "-n 2",
    )
    assert job.wait() == 0, job.output
    (log,) = shell.folder.glob(f"{stage}-*.out")
    assert log.read_text().count("resumes from") == 1
    for path in unbroken.glob("*.pt"):
        assert equal_snapshots(load(path), load(shell.folder / path.name)), path.name


@pytest.mark.long
def test_vae_continues_without_a_node(shell):
    """torchrun starts the rank that is left again, which ends as if it had been alone."""
    lose_node = FAULT.replace("os.kill(", "os.kill(os.getppid(), 9), os.kill(")  # and the launcher
    setup = f"torch.set_default_dtype(torch.float64)\n{WEIGHTS}{SGD}{lose_node}"
    script = patch(shell.folder, "ports/vae.py", setup)
    one = shell.folder / "one"
    shell.ranks_on([one], f"{script} 3").succeeds()
    torchrun = (
        f"torchrun --nnodes=1:2 --max-restarts=3 --rdzv_endpoint=localhost:{free_port()}"
        " --rdzv_backend=c10d --rdzv_conf=last_call_timeout=10,keep_alive_interval=1,is_host="
    )
    arguments = f"{script} 3 --save_every 5"
    first_node = shell.start(f"{torchrun}1 {arguments}", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    last_node = shell.start(f"{torchrun}0 {arguments}", FAULT="step 23 9")
    assert last_node.wait() != 0, "the node was not lost"
    assert first_node.wait() == 0, first_node.output
    assert "resumes from snapshot.pt at (1, 192)" in first_node.output
    weights = [load(folder / "rank0.weights") for folder in (one, shell.folder)]
    assert max_abs_diff(*weights) < 1e-12


def test_gan_sends_each_gradient_once(shell):
    """One bucket of the generator and one of the discriminator in each of 32 steps."""
    script = patch(shell.folder, "ports/gan.py", read_script("count_buckets.py"))
    output = shell.ranks(f"{script} 1 --batch_size 32", world_size=2).succeeds()
    assert output.count("64 buckets") == 2


@pytest.mark.parametrize(
    ("unit", "shared"),
    [(name, slice(None)) for name in ("request_stop", "any_rank_stops", "save", "load")]
    + [("constants", slice(-3, None)), ("main", slice(8)), ("main", slice(-3, None))],
)
def test_lines_are_the_same_in_each_port(unit, shared):
    """Of the constants, the last three; of main, how it starts and how it ends."""
    scripts = [units(f"ports/{port.name}.py") for port in PORTS]
    assert len({tuple(stripped(script[unit])[shared]) for script in scripts}) == 1


def test_images_are_evaluated_exactly(shell):
    """The accuracy is that of the weights and statistics that are saved, on each image once."""
    last_batch = "nn.BatchNorm2d = functools.partial(nn.BatchNorm2d, momentum=1.0)"
    script = patch(shell.folder, "ports/images.py", last_batch)
    logged = epochs(shell.ranks(f"{script} 1 --batch_size 9", world_size=3).succeeds())
    model = images_single.make_model()
    model.load_state_dict(load(shell.folder / "best.pt"))
    loader = DataLoader(images_single.Images(501, 2), 501)
    accuracy = images_single.evaluate(model, loader, torch.device("cpu"))
    assert logged == [f"epoch 1: accuracy {accuracy:.2%}"]


@pytest.mark.long
def test_recurrent_keeps_its_columns(shell):
    """Their number decides what is trained, and each is read by one rank."""
    shell.ranks("ports/recurrent.py 1").succeeds()
    shell.ranks("ports/recurrent.py 2 --columns 10").fails(
        "cannot resume: snapshot.pt is of 20 columns of 999 tokens, not of 10 columns of 1999"
    )
    shell.ranks("ports/recurrent.py 2", world_size=3).fails("--columns must be a multiple")
