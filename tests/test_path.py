"""A new user's path: types every command of README and the pages, in their order, in one clone."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
from helpers import ROOT, TIMEOUT_S, needs_slurm

# Between a command that ends and the next prompt, the shell prints the command's exit status.
PROMPT = re.compile(r"<status (\d+)>")
TWO_RANKS = "torchrun --standalone --nproc_per_node=2"
NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")


def pages():
    """Returns README and the pages in the order of the site."""
    nav = re.findall(r" (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in nav)]


def fences(page):
    """Returns the commands and the outputs that a page shows, in their order."""
    shown = []
    for kind, text in re.findall(
        r"^```(sh|text)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if kind == "text":
            shown.append((kind, text))
            continue
        for line in re.sub(r" \\\n +", " ", text).splitlines():
            shown.append((kind, line.partition("  #")[0].strip()))
    return shown


class Reader:
    """Follows the pages: whatever is typed must be what they show next."""

    def __init__(self):
        # `make long` tests `make check`, on our own files: the reader's are not written yet.
        self.unread = [
            (page.name, kind, text)
            for page in pages()
            for kind, text in fences(page)
            if not text.startswith("make check STAGE=")
        ]

    def next(self, kind, expected=None):
        page, found, text = self.unread.pop(0)
        assert (found, expected or text) == (kind, text), f"{page} shows {text!r} next"
        return text

    def skip(self, page):
        """Skips the rest of a page."""
        while self.unread and self.unread[0][0] == page:
            self.unread.pop(0)


class Terminal:
    """A shell in a terminal, as a user has it."""

    def __init__(self, folder, reader):
        self.reader = reader
        self.output = ""  # of the last command
        self.log = ""  # of all
        variables = {key: os.environ[key] for key in ("PATH", "HOME", "USER") if key in os.environ}
        self.bash = pexpect.spawn(
            "bash",
            ["--norc"],
            cwd=folder,
            env=variables | {"PROMPT_COMMAND": 'echo "<status $?>"', "TERM": "dumb"},
            encoding="utf-8",
            timeout=TIMEOUT_S,
            dimensions=(50, 250),
        )
        self.prompt()

    def start(self, command, *changes):
        """Types the next command of the pages, with (old, new) `changes` to fit this machine."""
        self.reader.next("sh", command)
        for old, new in changes:
            assert command.count(old) == 1, command
            command = command.replace(old, new)
        self.enter(command)

    def enter(self, command):
        self.output = ""
        self.bash.sendline(command)

    def sees(self, pattern):
        """Waits until the output has `pattern`, a regular expression; returns the match."""
        found = self.bash.expect([pattern, pexpect.TIMEOUT])
        self.add(self.bash.before + (self.bash.after if found == 0 else ""))
        assert found == 0, f"no {pattern!r} in {TIMEOUT_S} s:\n{self.output}"
        return self.bash.match

    def add(self, output):
        self.output += output
        self.log += output

    def prompt(self):
        return int(self.sees(PROMPT)[1])

    def run(self, command, *changes):
        """The same as `start`; the command must succeed."""
        self.start(command, *changes)
        assert self.prompt() == 0, self.output

    def interrupt(self):
        self.bash.sendintr()
        return self.prompt()

    def shows_next(self):
        """Asserts that the output has the lines that the pages show next; numbers within 5 %."""
        # A line replaces a progress bar, or another line, from a carriage return on.
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in self.output.split("\n")]
        shown = self.reader.next("text").replace("laptop", socket.gethostname())
        for expected in shown.splitlines():
            if expected == "…":
                continue
            parts = map(re.escape, NUMBER.sub("0.0", expected).split("…"))
            pattern = ".*".join(parts).replace(re.escape("0.0"), f"({NUMBER.pattern})")
            numbers = [float(number) for number in NUMBER.findall(expected)]
            found = filter(None, (re.search(pattern, line) for line in lines))
            printed = [[float(number) for number in match.groups()] for match in found]
            close = pytest.approx(numbers, rel=0.05)
            assert any(close == some for some in printed), f"no {expected!r} in\n{self.output}"


@pytest.fixture
def clone(tmp_path):
    """A fresh clone with what is not committed yet, and the environment of these tests."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def which_sees(terminals, pattern):
    """Waits until one of the terminals has the pattern, and returns that one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for terminal in terminals:
            if terminal.bash.expect([pattern, pexpect.TIMEOUT], timeout=0.1) == 0:
                terminal.add(terminal.bash.before + terminal.bash.after)
                return terminal
    raise AssertionError("\n".join(terminal.bash.before for terminal in terminals))


def in_each(terminals, command):
    """Types the next command of the pages into each of the terminals."""
    terminals[0].start(command)
    for terminal in terminals[1:]:
        terminal.enter(command)
    if not command.startswith("torchrun"):
        for terminal in terminals:
            assert terminal.prompt() == 0, terminal.output


def trained(terminal, name, snapshot, progress="epoch 50 "):
    """Waits until the job that was submitted last has saved; returns its number."""
    job = re.findall(r"Submitted batch job (\d+)", terminal.log)[-1]
    terminal.enter(f"tail -n +1 -F {name}-{job}.out")
    terminal.sees(rf"{progress}.*saved {snapshot}")
    terminal.interrupt()
    return job


def follow(terminal, progress):
    """Types the command that submit.py prints to follow its job."""
    command = re.search(r"follow +(tail.*?)\r", terminal.output)[1]
    terminal.enter(command.replace("-qF", "-n +1 -qF"))
    terminal.sees(progress)
    terminal.interrupt()


def leave(terminal, *jobs):
    """Cancels jobs and leaves the shell of a pocket cluster."""
    terminal.enter(f"scancel {' '.join(jobs)}" if jobs else "true")
    terminal.prompt()
    terminal.enter("exit")
    terminal.prompt()


def by_hand(one, two, three):
    """Stages 1 to 6, with terminals as nodes."""
    one.run("make run", ("make run", "python -m tools.chain.run --no-slurm"))
    table = one.output
    one.run(". .venv/bin/activate")
    one.output = table
    one.shows_next()
    one.run("diff --color -U0 multigpu.py multigpu_torchrun.py", ("--color", "--color || true; :"))

    for batch_size in (" --batch_size 2", ""):
        one.run(f"python bench/formula.py --params 8e9 --gpus 64{batch_size}")
        one.shows_next()

    one.run("python singlegpu.py 50 10")
    one.shows_next()

    one.run("python multigpu.py 50 10 --snapshot_path multigpu.pt")
    one.shows_next()
    one.run(
        "sed 's/sampler=sampler/shuffle=True/; /set_epoch/d; /all_reduce/d;"
        " s/total_size/num_samples/' multigpu.py > no_sampler.py"
    )
    one.run("python no_sampler.py 25 5 --snapshot_path no_sampler.pt")
    one.shows_next()
    one.run("python multigpu.py 50 10 --batch_size 16 --snapshot_path batch16.pt")
    one.shows_next()
    one.run(
        "python -c \"import torch; a, b = (torch.load(path)['model'] for path in"
        " ('snapshot.pt', 'batch16.pt'));"
        ' print(max((a[name] - b[name]).abs().max().item() for name in a))"'
    )

    one.run("export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    one.run(
        "torchrun --standalone --nproc_per_node=2 --max-restarts=3"
        " multigpu_torchrun.py 50 10 --snapshot_path torchrun.pt"
    )
    one.shows_next()
    to_be_killed = (
        "torchrun --standalone --nproc_per_node=2 --max-restarts=3"
        " multigpu_torchrun.py 5000 100 --snapshot_path killed.pt"
    )
    one.start(to_be_killed)
    one.sees("epoch 100 ")
    two.run("pgrep -f multigpu_torchrun.py")
    number = re.findall(r"^(\d+)\r?$", two.output, re.MULTILINE)[-1]
    two.run("kill -9 NUMBER", ("NUMBER", number))
    if one.sees(r"\d+ of 5000 epochs done|JSONDecodeError")[0] == "JSONDecodeError":
        # As docs/errors.md says: torchrun has ended the other process while that wrote its error.
        one.prompt()
        one.bash.sendline(to_be_killed)
        one.sees(r"\d+ of 5000 epochs done")
        one.reader.next("text")
    else:
        one.sees("saved killed.pt")
        one.shows_next()
    assert one.interrupt() != 0

    nodes = (one, two)
    for command in (
        ". .venv/bin/activate",
        "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TORCH_CPP_LOG_LEVEL=ERROR",
        "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d"
        " --rdzv_endpoint=localhost:29400 multinode.py 50 10 --snapshot_path multinode.pt",
    ):
        in_each(nodes, command)
    for node in nodes:
        assert node.prompt() == 0
    (one if "saved" in one.output else two).shows_next()
    in_each(nodes, "export PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=localhost:29400")
    in_each(
        nodes,
        "torchrun --nnodes=2 --nproc_per_node=4 multinode.py 100 10 --snapshot_path multinode.pt",
    )
    for node in nodes:
        assert node.prompt() == 0
        node.enter("unset PET_RDZV_BACKEND PET_RDZV_ENDPOINT")
        node.prompt()
    one.run(
        "slurm/pocket-cluster -n 2 -g 4"
        " sbatch slurm/multinode.sbatch 50 10 --snapshot_path multinode_job.pt"
    )

    stopped_and_resumed(one)
    nodes = (one, two, three)
    for command in (
        ". .venv/bin/activate",
        "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TORCH_CPP_LOG_LEVEL=ERROR",
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        "export PET_RDZV_CONF=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5",
    ):
        in_each(nodes, command)
    elastic = (
        "torchrun --nnodes=1:3 --nproc_per_node=2 --max-restarts=100 --rdzv_backend=c10d"
        " --rdzv_endpoint=localhost:29400 elastic_ddp.py 5000 100 --snapshot_path elastic_ddp.pt"
    )
    one.start(elastic)
    one.sees(r"rank \d of 2 starts")  # so that the rendezvous is here
    two.enter(elastic)
    three.enter(elastic)
    for node in nodes:
        node.sees(r"rank \d of 6 starts")
    which_sees(nodes, r"\d+ of 5000 epochs done")  # until then, the ranks wait for one another
    three.interrupt()
    for node in (one, two):
        node.sees(r"rank \d of 4 starts")
    which_sees((one, two), "saved elastic_ddp.pt").shows_next()
    three.enter(elastic)
    for node in nodes:
        node.sees(r"rank \d of 6 starts")
    which_sees(nodes, "saved elastic_ddp.pt")
    for node in nodes:
        node.bash.sendintr()
    for node in nodes:
        node.prompt()


def stopped_and_resumed(one):
    """Stops stage 5 by Ctrl-C, by the signal of a time limit, and by a preemption."""
    arguments = "preemptible.py 5000 1000 --save_every_steps 50"
    one.start(f"{TWO_RANKS} {arguments} --snapshot_path preemptible.pt")
    one.sees("saved preemptible.pt")
    one.bash.sendintr()
    one.sees("stopped by a signal")
    one.prompt()
    one.shows_next()
    four_ranks = TWO_RANKS.replace("=2", "=4")
    one.start(f"{four_ranks} {arguments} --batch_size 16 --snapshot_path preemptible.pt")
    one.sees("saved preemptible.pt")
    one.interrupt()
    one.shows_next()

    one.run("slurm/pocket-cluster -n 2")
    submit = "--gpus-per-node=1 slurm/preemptible.sbatch 5000 1000 --snapshot_path"
    one.run(f"sbatch {submit} limit.pt")
    job = re.search(r"job (\d+)", one.output)[1]
    one.start("tail -F preemptible-JOB.out", ("JOB", job), ("-F", "-n +1 -F"))
    one.sees("saved limit.pt")
    one.interrupt()
    one.run("scancel --batch --signal=USR1 JOB", ("JOB", job))
    one.run("squeue")
    one.start("tail -F preemptible-JOB.out", ("JOB", job), ("-F", "-n +1 -F"))
    one.sees("stopped by a signal")
    one.sees(r"\d+ of 5000 epochs done")
    one.interrupt()
    one.shows_next()
    one.run(f"sbatch --partition=grace {submit} grace.pt")
    graced = re.findall(r"Submitted batch job (\d+)", one.output)[-1]
    one.enter(f"tail -n +1 -F preemptible-{graced}.out")
    one.sees("saved grace.pt")
    one.interrupt()
    one.run("sbatch --partition=urgent --exclusive --nodes=2 --wrap hostname")
    one.run("squeue")
    leave(one, job, graced)


def on_slurm(one):
    """The elastic job file, the first job on a cluster, and the launchers."""
    one.run("slurm/pocket-cluster -n 3")
    one.run(
        "sbatch --gpus-per-node=1 slurm/elastic_ddp.sbatch 400 5 --timeout 0.5"
        " --snapshot_path elastic_job.pt"
    )
    job = re.search(r"job (\d+)", one.output)[1]
    one.start("tail -F elastic_ddp-JOB.out", ("JOB", job))
    one.sees("epoch 5 ")
    one.interrupt()
    one.run("power off node1")
    one.run("squeue")
    one.enter("until squeue | grep ' PD '; do sleep 1; done")
    one.prompt()
    one.run("power on node1")
    one.start("tail -F elastic_ddp-JOB.out", ("JOB", job), ("-F", "-n +1 -F"))
    one.sees(r"[1-9]\d* of 400 epochs done")
    one.sees("saved")
    one.interrupt()
    one.shows_next()
    leave(one, job)

    one.enter("slurm/pocket-cluster -n 3")
    one.prompt()
    one.run("sinfo")
    one.run("scontrol show partition")
    one.run("make .venv/run", ("make", "make -o requirements.txt -o constraints.txt"))
    one.run(
        'srun --gpus-per-node=1 .venv/bin/python -c "import torch;'
        ' print(torch.cuda.is_available())"'
    )
    one.run(
        "sbatch --nodes=2 --gpus-per-node=2 --time=00:05:00 slurm/multinode.sbatch 50 10"
        " --snapshot_path first.pt"
    )
    one.run("squeue --me")
    trained(one, "multinode", "first.pt")
    one.shows_next()
    one.enter("on node3 tc qdisc replace dev eth0 root tbf rate 20mbit burst 64kb latency 300ms")
    assert one.prompt() == 0
    check = "--time=00:10:00 slurm/multinode.sbatch slurm/check_cluster.py"
    one.run(f"sbatch --nodes=3 --gpus-per-node=4 {check}", ("node=4", "node=1"))
    job = re.search(r"job (\d+)", one.output)[1]
    one.enter(f"tail -n +1 -F multinode-{job}.out")
    one.sees("slow nodes: .*node3")
    one.interrupt()
    one.reader.next("text")  # speeds

    # The packages of this line are there.
    one.reader.next("sh", "sudo apt-get install slurm-wlm munge iproute2")
    leave(one)
    one.run("slurm/pocket-cluster -n 3 srun -N3 hostname")
    one.shows_next()
    one.run("slurm/pocket-cluster -n 3 -g 4")
    one.run(". .venv/bin/activate")
    one.run(
        "sbatch --nodes=3 --gpus-per-node=4 slurm/multinode.sbatch 50 10"
        " --snapshot_path three_nodes.pt",
        ("=4", "=1"),
    )
    one.run("squeue")
    job = trained(one, "multinode", "three_nodes.pt", "epoch 10 ")
    one.run("scancel JOB", ("JOB", job))
    one.run(
        "srun --nodes=2 --gres=gpu:2 --cpus-per-gpu=4 ./slurm/torchrun_script.sh multinode.py 50 10"
        " --snapshot_path interactive.pt"
    )
    assert "epoch 50 " in one.output
    submit = "python slurm/submit.py --nodes 2 --gpus_per_node 4"
    one.run(f"{submit} multinode.py 50 10 --snapshot_path submitted.pt", ("node 4", "node 1"))
    follow(one, "epoch 50 ")
    one.run(
        f"{submit} --cluster local multinode.py 50 10 --snapshot_path submitted_here.pt",
        ("node 4", "node 1"),
    )
    follow(one, "epoch 50 ")
    one.run(
        "sbatch slurm/multinode_srun.sbatch 50 10 --snapshot_path tasks.pt",
        ("sbatch slurm", "sbatch --gpus-per-node=1 slurm"),
    )
    trained(one, "multinode_srun", "tasks.pt")
    leave(one)
    one.reader.skip("job_files.md")  # test_lines_for_job_files tests that


def what_it_costs(one):
    """The formula, in which the page puts the figures of its measurements."""
    one.reader.next("sh", "python bench/cost.py")  # `make long` does that: tests/test_cost.py
    one.run("python bench/formula.py")
    one.shows_next()
    one.shows_next()


def with_recipes(one, two):
    """The recipes."""
    recipe = f"{TWO_RANKS} recipes"
    one.run(f"{recipe}/evaluate.py 50 10 --snapshot_path first_recipe.pt")
    # test_failure_fails_the_job submits one.
    submit = "sbatch slurm/multinode.sbatch recipes/evaluate.py 50 10"
    one.reader.next("sh", f"{submit} --snapshot_path slurm_evaluate.pt")
    one.enter("cp multinode.py mine.py")
    one.prompt()
    one.run("git merge-file mine.py multinode.py recipes/evaluate.py")
    for name in ("mixed_precision", "gradient_accumulation", "evaluate"):
        one.run(f"{recipe}/{name}.py 50 10 --snapshot_path {name}.pt")
        one.shows_next()
    one.run(f"{recipe}/tensorboard_logging.py 50 10 --snapshot_path watched.pt")
    two.start("tensorboard --logdir logs")
    two.sees(r"to quit\)")
    one.shows_next()
    two.shows_next()
    two.interrupt()
    one.run(f"{recipe}/monitor.py 50 10 --snapshot_path monitored.pt")
    one.shows_next()
    one.run(f"{recipe}/stragglers.py 50 10 --snapshot_path stragglers.pt")
    one.shows_next()
    one.run(f"{recipe}/profiler.py 50 10 --snapshot_path profiled.pt")
    one.shows_next()
    one.run(
        "sed -e 's/nn.ReLU()/nn.Sequential(nn.Linear(10, 1000), WIDE, WIDE, nn.Linear(1000, 10))/'"
        " -e 's/WIDE/nn.Linear(1000, 1000)/g' recipes/profiler.py > wide.py"
    )
    one.run(f"{TWO_RANKS} wide.py 1 1 --snapshot_path wide.pt")
    assert "saving the trace wide.pt.trace.json" in one.output
    one.run(f"{recipe}/verify.py 50 10 --snapshot_path verified.pt")
    different_and_infinite_weights(one)
    one.run(f"{recipe}/fsdp.py 50 10 --snapshot_path fsdp.pt")
    one.shows_next()
    one.run(f"{recipe}/images.py 10 5 --snapshot_path images.pt")
    one.shows_next()
    one.reader.next("text")  # tests/test_images.py runs the scripts of this page
    one.reader.next("text")
    one.run("sed 's/BatchNorm2d(/GroupNorm(4, /' recipes/images.py > group_norm.py")
    outputs = ""
    for script, name in [("recipes/images.py", "b"), ("group_norm.py", "g")]:
        one_rank = TWO_RANKS.replace("=2", "=1")
        one.run(f"{one_rank} {script} 2 2 --batch_size 64 --snapshot_path {name}1.pt")
        outputs += one.output
        one.run(f"{TWO_RANKS} {script} 2 2 --snapshot_path {name}2.pt")
        outputs += one.output
    one.output = outputs
    one.shows_next()
    one.reader.next("text")
    one.enter("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5")  # 30 seconds by default
    one.prompt()
    options = "--step_timeout 10 --snapshot_path step_timeout.pt"
    one.start(f"{recipe}/step_timeout.py 5000 1000 {options}")
    one.sees("saved step_timeout.pt")
    two.run("pgrep -f recipes/step_timeout.py")
    clone = os.path.realpath(one.bash.cwd)
    numbers = map(int, re.findall(r"^(\d+)\r?$", two.output, re.MULTILINE))
    ours = [number for number in numbers if os.path.realpath(f"/proc/{number}/cwd") == clone]
    two.run("kill -STOP NUMBER", ("NUMBER", str(ours[-1])))
    assert one.prompt() == 1
    one.shows_next()
    # test_frozen_rank_in_a_job submits one.
    one.reader.next("sh", "sbatch slurm/step_timeout.sbatch 50 10 --step_timeout 60")


def different_and_infinite_weights(one):
    """Copies of scripts that fail, as the page of recipes/verify.py says."""
    one.run(
        r"sed 's/^            if step %/            if step == 37 and dist.get_rank() == 1:\n"
        r"                self.model.module.net2.weight.data[3, 4] += 1e-6\n&/'"
        " recipes/verify.py > faulty.py"
    )
    torchrun = TWO_RANKS.replace("2", "3")
    one.start(f"{torchrun} faulty.py 4 --verify_every 10 --snapshot_path faulty.pt")
    assert one.prompt() == 1
    one.shows_next()
    page = (ROOT / "docs" / "recipes" / "verify.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    Path(one.bash.cwd, "trace_nan.py").write_text(code)
    one.run(
        r"sed 's/^        self.optimizer.zero_grad/"
        r"        if self.epochs_run == 1 and dist.get_rank() == 1:\n"
        r"            self.model.module.net2.bias.data[0] = torch.inf\n&/'"
        " multinode.py > infinite.py"
    )
    one.start(f"{TWO_RANKS} trace_nan.py infinite.py 4 --snapshot_path infinite.pt")
    assert one.prompt() == 1
    one.shows_next()


def regroup(terminals):
    """One has the coordinator, each of the other three a process, of which the last is killed."""
    one, *others = terminals
    for command in (
        ". .venv/bin/activate",
        "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= TORCH_CPP_LOG_LEVEL=ERROR",
    ):
        in_each(terminals, command)
    one.run("python recipes/coordinator.py localhost:29400 &")
    arguments = "5000 100 --coordinator localhost:29400 --snapshot_path regroup.pt"
    command = f"python recipes/regroup.py {arguments}"
    for number, terminal in enumerate(others, 1):
        (terminal.start if number == 1 else terminal.enter)(command)
        which_sees(others, f"group {number}: {number} processes")
    one.run("pgrep -f recipes/regroup.py")
    numbers = map(int, re.findall(r"^(\d+)\r?$", one.output, re.MULTILINE))
    clone = os.path.realpath(one.bash.cwd)
    ours = [number for number in numbers if os.path.realpath(f"/proc/{number}/cwd") == clone]
    one.run("kill -9 NUMBER", ("NUMBER", str(ours[-1])))
    assert others[-1].prompt() != 0
    survivor = which_sees(others[:2], "group 4: 2 processes")
    survivor.sees("of 5000 epochs done.*")
    survivor.shows_next()
    others[-1].enter(command)
    which_sees(others, "group 5: 3 processes")
    others[0].bash.sendintr()
    for terminal in others:
        terminal.prompt()
    one.enter("python bench/formula.py")
    one.prompt()
    one.shows_next()
    torchrun = "torchrun --standalone --nproc_per_node=1 --max-restarts=5"
    one.start(f"{torchrun} recipes/regroup.py {arguments}")
    one.sees("group 6: 1 processes")
    one.interrupt()
    one.enter("kill %1")
    one.prompt()


def second_series(one):
    """The GPT, on a small text."""
    stdlib = '$(python -c "import os; print(os.path.dirname(os.__file__))")'
    one.run(f"cat {stdlib}/d*.py > text.txt")
    one.run("export OMP_NUM_THREADS=1")
    one.run(f"{TWO_RANKS} gpt/gpt.py 2 1 --text text.txt --snapshot_path gpt.pt")
    one.shows_next()
    arguments = "1 1 --text text.txt --save_every_steps 50 --snapshot_path"
    one.run(f"{TWO_RANKS} gpt/pretrain.py {arguments} pretrain.pt")
    one.shows_next()
    batch = "1 1 --text text.txt --batch_size 64"
    over_a_slow_link(
        one,
        f"gpt/pretrain.py {batch} --snapshot_path uncompressed.pt",
        f"gpt/slow_network.py {batch} --compress --snapshot_path compressed.pt",
    )
    one.run(f"{TWO_RANKS} gpt/fsdp.py {arguments} fsdp")
    one.shows_next()
    convert = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch"
    one.run(f"{convert} fsdp/epoch_0001_sample_000000000000 gpt_fsdp.pt")
    four_ranks = TWO_RANKS.replace("=2", "=4")
    one.run(
        f"{four_ranks} gpt/hsdp.py 1 1 --text text.txt --batch_size 16"
        " --save_every_steps 50 --shard_size 2 --snapshot_path hsdp"
    )
    one.shows_next()
    one.run(f"{TWO_RANKS} gpt/async_save.py {arguments} async_save")
    one.shows_next()
    with_tp = arguments.replace("--save", "--tp_size 2 --save")
    one.run(f"{four_ranks} gpt/tensor_parallel.py {with_tp} tensor_parallel")
    one.shows_next()
    with_pp = arguments.replace("--save", "--pp_size 2 --save")
    one.run(f"{four_ranks} gpt/pipeline_parallel.py {with_pp} pipeline")
    one.shows_next()
    with_cp = arguments.replace("--save", "--batch_size 64 --save")
    one.run(f"{TWO_RANKS} gpt/context_parallel.py {with_cp} context.pt")
    one.shows_next()
    over_a_slow_link(one, f"gpt/local_sgd.py {batch} --sync_every 19 --snapshot_path local_sgd")
    options = "--vocab_size 512 --shard_tokens 100000"
    one.run(f"python gpt/prepare_tokens.py tokens --text text.txt {options}")
    options = "--save_every_steps 50 --snapshot_path tokens.pt"
    one.run(f"{TWO_RANKS} gpt/tokens.py 2 1 --data tokens {options}")
    one.shows_next()


def slow_data(one):
    """A folder packed into one file; the benchmark's figures depend on the machine."""
    one.run("python recipes/pack_files.py docs docs.packed")
    one.shows_next()
    one.run("python bench/small_files.py", ("files.py", "files.py --files 1000"))
    one.reader.next("text")


def over_a_slow_link(one, *scripts):
    one.run("slurm/pocket-cluster -n 2 -g 1 --bandwidth 20mbit")
    one.run(". .venv/bin/activate")
    outputs = []
    for script in scripts:
        one.run(f"srun --nodes=2 --gres=gpu:1 ./slurm/torchrun_script.sh {script}")
        outputs.append(one.output)
    one.run("exit")
    for one.output in outputs:
        one.shows_next()


@pytest.mark.path
@needs_slurm
def test_path(clone):
    reader = Reader()
    # What `make test` runs is this test, and it needs what the third line installs.
    for command in ("make run", "make test", "sudo apt-get install slurm-wlm munge iproute2"):
        reader.next("sh", command)
    terminals = [Terminal(clone, reader) for _ in range(3)]
    one = terminals[0]
    one.run("slurm/pocket-cluster")
    one.enter("exit")
    one.prompt()
    by_hand(*terminals)
    on_slurm(one)
    with_recipes(*terminals[:2])
    regroup([*terminals, Terminal(clone, reader)])
    second_series(one)
    reader.skip("check.md")  # `make long` and tests/test_check.py test that
    reader.skip("faults.md")  # and that
    slow_data(one)
    what_it_costs(one)
    reader.skip("errors.md")  # tests/test_hangs.py and others provoke that
    reader.skip("hangs.md")  # and that
    reader.skip("debugging.md")  # and that
    assert not reader.unread
