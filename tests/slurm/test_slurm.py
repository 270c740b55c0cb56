"""The job files and launchers, each on a real Slurm, and that nothing is left of it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from helpers import (
    ALL_DONE,
    NIGHTLY,
    assert_trained,
    documented_error,
    first,
    long,
    needs_slurm,
    patch,
    pause,
    run,
    snippet,
    weights_diff,
)
from rankcheck.launch.jobs import TimeLimit
from torch.distributed.launcher.api import LaunchConfig

from tools.launch.snapshots import logged_positions
from tools.steps import ROOT

pytestmark = needs_slurm
# One write a line: the processes share a pipe.
RANKS = """import os
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
"""


def log(folder, name):
    (path,) = folder.glob(f"{name}-*.out")
    return path.read_text()


def state_of_machine(folder):
    """Returns what a cluster with this temporary folder could leave behind on this machine."""
    mounts = {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}
    return mounts, *(set(os.listdir(path)) for path in ("/sys/class/net", "/var/opt", folder))


@pytest.fixture
def nothing_is_left(shell):
    """Asserts in the end that no process is left, and the machine is as before."""
    folder = shell.folder / "tmp"
    folder.mkdir()
    folder.chmod(0o777)
    before = state_of_machine(folder)
    yield
    limit = TimeLimit(10)
    while any(job.processes() for job in shell.jobs):
        assert not limit.passed()
        time.sleep(0.02)  # the kernel takes a moment to end what was inside
    assert state_of_machine(folder) == before


def refuses_users():
    """Whether ordinary users may make no namespaces here, as on Ubuntu 24.04."""
    command = [*AS_USER, "unshare", "--user", "true"]
    return bool(shutil.which("unshare")) and subprocess.run(command, check=False).returncode != 0


AS_USER = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"] if os.getuid() == 0 else []
SETTING = "kernel.apparmor_restrict_unprivileged_userns=0"
needs_namespaces = pytest.mark.skipif(refuses_users(), reason=f"needs sudo sysctl -w {SETTING}")


def as_user(folder):
    """Returns a command prefix that makes root an ordinary user, who finds the tool in `folder`."""
    folder = folder / "for-all"
    folder.mkdir()
    shutil.copy(ROOT / "slurm" / "pocket-cluster", folder)
    for parent in [folder, *folder.parents]:
        if Path(tempfile.gettempdir()) not in parent.parents:
            break  # only pytest's own folders are ours to open
        parent.chmod(parent.stat().st_mode | 0o055)
    return f"cd {folder} && {' '.join(AS_USER)} env HOME=/tmp"


@needs_namespaces
def test_up_and_gone(shell, nothing_is_left):
    """Two clusters at once, one of an ordinary user, do not disturb each other."""
    command = "./pocket-cluster -n 2 sh -c 'srun -N2 hostname; exit 7'"
    prefixes = (f"cd {ROOT}/slurm &&", as_user(shell.folder))
    jobs = [shell.start(f"export TMPDIR=$PWD/tmp; {prefix} {command}") for prefix in prefixes]
    for job in jobs:
        assert job.wait() == 7  # the command's exit status
        assert sorted(job.output.splitlines()) == ["node1", "node2"]


@pytest.mark.parametrize("victim", first(1, ["its parent", signal.SIGTERM, signal.SIGINT]))
def test_stopped_in_the_middle(shell, nothing_is_left, victim):
    # A shell that started the tests in the background made them, and all below, ignore Ctrl-C.
    program = f"env --default-signal=INT TMPDIR=$PWD/tmp {ROOT}/slurm/pocket-cluster"
    command = f"{program} bash -c 'srun hostname; sleep 1000'"
    job = shell.start(f"{command}; true" if victim == "its parent" else f"exec {command}")
    job.wait_for("node1")
    os.kill(job.process.pid, signal.SIGKILL if victim == "its parent" else victim)
    assert job.wait() != 0


@pytest.mark.long
@needs_namespaces
def test_job_files(cluster, shell):
    """Each trains as the same stage does by hand, with global batches of 64 in all of them.

    Options on the command line do not multiply the launchers, nor take their variables from them.
    One job file starts another script, the first of its arguments.
    Root becomes an ordinary user for it, but one who may read the Python that runs this.
    """
    (shell.folder / "gpt").symlink_to(ROOT / "gpt")
    (shell.folder / "text").write_bytes(bytes(range(256)) * 4)
    tiny_gpt = "--text text --n_embd 16 --context 8 --snapshot_path gpt.snapshot"
    submit = "sbatch --ntasks-per-node=2 --export=NONE"
    torchrun = f"{submit} --gpus-per-node=1 slurm/multigpu_torchrun.sbatch 4 2 --batch_size 64"
    job = cluster(
        f"""
        {submit} slurm/singlegpu.sbatch 4 2 --batch_size 64 --snapshot_path singlegpu.pt
        {submit} --gpus-per-node=2 slurm/multigpu.sbatch 4 2 --snapshot_path multigpu.pt
        {torchrun} --snapshot_path torchrun.pt
        {submit} --gpus-per-node=1 slurm/multinode.sbatch 4 2 --snapshot_path multinode.pt
        {submit} --gpus-per-node=1 slurm/multinode_srun.sbatch 4 2 --snapshot_path srun.pt
        {submit} --gpus-per-node=1 slurm/preemptible.sbatch gpt/gpt.py 1 1 {tiny_gpt}
        srun id -u
        """,
        "-n 3",
        prefix="unshare --user --map-user=1234 --map-group=1234" if os.getuid() == 0 else "",
    )
    assert job.wait() == 0, job.output
    assert job.output.count("COMPLETED") == 6, job.output
    assert str(os.getuid() or 1234) in job.output.splitlines(), "this ran as root"
    for path in shell.folder.glob("*.pt"):
        losses = assert_trained(path, 4, 64)
    logs = {path.name.rpartition("-")[0]: path.read_text() for path in shell.folder.glob("*.out")}
    assert len(logs) == 6
    for name, text in logs.items():
        if name == "preemptible":
            assert "epoch 1 + 0 samples" in text and "saved gpt.snapshot" in text, text
        else:
            (loss,) = re.findall(r"epoch 4 \| loss (\S+)", text)
            assert float(loss) == pytest.approx(losses[-1], rel=1e-3)
        # torchrun may leave such a line at its end, as docs/errors.md says.
        shutdown = documented_error("has failed to shutdown the rendezvous")
        heartbeat = documented_error("has failed to send a keep-alive heartbeat to the rendezvous")
        barrier = documented_error("Error waiting on exit barrier")
        line = r".*agent/server/api.py:\d+\] "  # also that of each line of the traceback
        text = re.sub(rf"{line}{barrier}.*\n({line}.*\n)*", "", text)
        text = re.sub(rf".*({shutdown}|{heartbeat}).*\n", "", text)
        assert not re.search(r"warn|\[?[WE]\d{4} ", text, re.IGNORECASE), text


def ranks_in(text):
    """Returns the lines in which the ranks tell their numbers."""
    return re.findall(r"rank \d+ of \d+", text)


@pytest.fixture
def ranks(cluster, shell):
    """A pocket cluster where multinode.py only says its rank, for tests of the launchers alone."""
    (shell.folder / "multinode.py").unlink()
    (shell.folder / "multinode.py").write_text(RANKS)
    return cluster


@pytest.mark.long
def test_more_nodes_and_interactive(ranks, shell):
    """3 nodes with 4 processes each; then a step of 2 x 2, which has every rank once.

    A step without GPUs ends with one line.
    """
    job = ranks(
        f"""
        sbatch --nodes=3 --gpus-per-node=4 slurm/multinode.sbatch
        squeue; {ALL_DONE}
        . .venv/bin/activate
        srun --nodes=2 --gres=gpu:2 --cpus-per-gpu=4 ./slurm/torchrun_script.sh multinode.py 50 10
        srun --nodes=2 ./slurm/torchrun_script.sh multinode.py 50 10 2>no_gpus || true
        job=$(sbatch --parsable --hold slurm/multinode.sbatch)
        scancel $job
        """,
        "-n 3",
    )
    job.wait()
    assert "CANCELLED" in job.output
    lines = (shell.folder / "no_gpus").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("srun: ")]
    assert line.startswith("torchrun_script.sh: start it on nodes with GPUs: srun --nodes=2 ")
    lines = ranks_in(log(shell.folder, "multinode"))
    assert sorted(lines) == sorted(f"rank {n} of 12" for n in range(12))
    ranks = sorted(line for line in job.output.splitlines() if line.startswith("rank"))
    assert ranks == [f"rank {n} of 4" for n in range(4)]


# Makes the training last for long enough, and notes the position at which each step starts.
PAUSE = f"""{pause(0.03)}
@before(script.Trainer, "_run_batch")
def note(self, inputs, targets):
    if self.is_main:
        with open("trained.log", "a") as file:
            print(self.epochs_run, self.samples_run, file=file)
"""


def lives(folder, name):
    """Returns the positions that each start of the training has saved, in the job's log."""
    return [logged_positions(life) for life in log(folder, name).split("epochs done")[1:]]


def trained(folder):
    """Returns the positions at which steps have started, in their order."""
    lines = (folder / "trained.log").read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


PREEMPT = "sbatch --partition=urgent --exclusive --nodes=$nodes --output=urgent.out --wrap true"
TIME_LIMIT = "scancel --signal=USR1 --batch $job"


@pytest.mark.long
@pytest.mark.parametrize(
    ("partition", "nodes", "faults"), [("grace", 1, [PREEMPT]), ("main", 2, [TIME_LIMIT, PREEMPT])]
)
def test_preemptible(cluster, shell, partition, nodes, faults):
    """At the signal of a time limit, and at a preemption, the job saves, comes back and continues.

    A partition with a GraceTime leaves the requeue after a preemption to the job file.
    """
    patch(shell.folder, "preemptible.py", PAUSE)
    waits = "".join(
        f"""
        until grep -q "^{2 * n} [1-9]" trained.log; do sleep 0.1; done 2>/dev/null
        {fault}
        """
        for n, fault in enumerate(faults, 1)
    )
    epochs = 2 * len(faults) + 1
    options = f"--nodes={nodes} --gpus-per-node={2 // nodes} --partition={partition}"
    job = cluster(
        f"""
        nodes={nodes}
        job=$(sbatch --parsable {options} slurm/preemptible.sbatch {epochs} 2)
        {waits}
        """,
        f"-n {nodes}",
    )
    assert job.wait() == 0, job.output
    output = log(shell.folder, "preemptible")
    assert output.count("epochs done") == len(faults) + 1, output
    for number, saved in enumerate(lives(shell.folder, "preemptible")[:-1], 1):
        assert saved[-1] > (2 * number, 0), saved  # that of the fault
    steps = [(epoch, samples) for epoch in range(epochs) for samples in range(0, 2048, 64)]
    assert trained(shell.folder) == steps, output
    assert_trained(shell.folder / "snapshot.pt", epochs, 64)


@pytest.mark.nightly
def test_array(cluster, shell):
    """docs/job_files.md: a task for each seed; the signal of a time limit requeues only its own."""
    patch(shell.folder, "preemptible.py", PAUSE)
    job_file = (ROOT / "slurm" / "preemptible.sbatch").read_text()
    last = "requeue_on_signal srun"
    sweep = job_file.replace(last, snippet("job_files.md", "seeds=") + last)
    (shell.folder / "sweep.sbatch").write_text(sweep)
    page = (ROOT / "docs" / "job_files.md").read_text()
    (options,) = re.findall("^sbatch (--array.*) 50 10$", page, re.MULTILINE)
    job = cluster(
        f"""
        job=$(sbatch --parsable {options} 4 2)_1
        until grep -q "epoch 2 " preemptible-$job.out; do sleep 0.1; done 2>/dev/null
        {TIME_LIMIT}
        """,
        "-n 1",
    )
    assert job.wait() == 0, job.output
    for task, (seed, starts) in enumerate([(0, 1), (10**9, 2)]):
        (path,) = shell.folder.glob(f"preemptible-*_{task}.out")
        output = path.read_text()
        assert output.count("epochs done") == starts, output
        assert_trained(shell.folder / f"seed_{seed}.pt", 4, 32, seed=seed)


FAULTS = {
    "lost": "power off node3",
    "time limit": TIME_LIMIT,
    # As where Slurm uses cgroups: only what slurmstepd has started gets the signal.
    "signal": "pkill -TERM --parent $(pgrep -d , slurmstepd) --full 'requeue.sh torchrun'",
    "preemption": PREEMPT,
}


@pytest.mark.parametrize(
    "fault", [*long("lost"), *(pytest.param(f, marks=NIGHTLY) for f in list(FAULTS)[1:])]
)
def test_elastic(cluster, shell, fault):
    """The job continues without the node it has lost; else it is requeued, and resumes."""
    patch(shell.folder, "elastic_ddp.py", PAUSE)
    job = cluster(
        f"""
        nodes=3
        export PET_RDZV_CONF=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5
        options="--partition=grace --gpus-per-node=1 --ntasks-per-node=2"
        job=$(sbatch --parsable $options slurm/elastic_ddp.sbatch 8 2 --timeout 6)
        until grep -q "epoch 2 " elastic_ddp-$job.out; do sleep 0.1; done 2>/dev/null
        {FAULTS[fault]}
        """,
        "-n 3",
    )
    assert job.wait() == 0, job.output
    output = log(shell.folder, "elastic_ddp")
    starts = re.findall(r"rank 0 of (\d) on \S+ starts", output)
    if fault == "lost":
        assert starts.count("3") == 1 and starts[-1] == "2", output
    else:
        assert starts.count("3") == 2, output
        assert lives(shell.folder, "elastic_ddp")[0][-1] > (2, 0), output  # saved at the signal
    assert_trained(shell.folder / "snapshot.pt", 8, 64)


@pytest.mark.parametrize("name", ["preemptible", "elastic_ddp"])
def test_time_to_save(name, monkeypatch):
    """After the signal, torchrun waits for longer than by default, but not beyond the limit."""
    job_file = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    (before_limit,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+) ", job_file, re.MULTILINE)
    (variable, value) = re.findall(r"^export (\w+_SHUTDOWN_TIMEOUT)=(\d+) ", job_file, re.M)[0]
    default = LaunchConfig(1, 1, 1).shutdown_timeout
    monkeypatch.setenv(variable, value)
    assert default < LaunchConfig(1, 1, 1).shutdown_timeout < int(before_limit)


# It does not answer the first question.
BUSY_SCONTROL = """#!/bin/sh
[ -e asked ] || { touch asked; exit 1; }
echo ' PreemptTime=%s'
"""


def requeue(folder, *arguments, day=1, preempted="None"):
    """Requeues job 7, as slurm/requeue.sh does at the end of a life, each of which lasts a day."""
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(BUSY_SCONTROL % preempted)
    scontrol.chmod(0o755)
    if not (sleep := scontrol.with_name("sleep")).exists():
        sleep.symlink_to("/bin/true")
    env = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": f"{day - 1}"}
    env["SLURM_JOB_ID"] = "7"
    command = f'source {ROOT}/slurm/requeue.sh && requeue "$@"'
    return run("bash", "-c", command, "bash", *arguments, folder=folder, env=env)


@pytest.mark.parametrize(
    "sign, save, lives",
    [
        (" ", "touch -d 2020-01-$DAY run.pt", 12),
        ("=", "[ -e run.pt ] || touch -d 2020-01-$DAY run.pt", 3),
        (" ", "mkdir -p disk/1; ln -sfn disk run.pt; touch -d 2020-01-$DAY disk/1/.metadata", 12),
        (" ", "mkdir -p run.pt/1; touch -d 2020-01-$DAY run.pt/1/rank0", 10),  # never complete
        (" ", "true", 10),
    ],
)
def test_requeued_while_it_makes_progress(tmp_path, sign, save, lives):
    """Twelve slices of a long training; without progress, two; without any snapshot, ten."""
    results = []
    for day in range(1, 13):
        assert run("sh", "-c", save, folder=tmp_path, env={"DAY": f"{day:02}T12:00"}).stderr == ""
        for _ in range(2):  # on two nodes
            result = requeue(tmp_path, *f"--snapshot_path{sign}run.pt".split(), day=day)
        results.append(result)
        if results[-1].returncode != 0:
            words = (
                "lives in a row have saved nothing at run.pt: is --snapshot_path the same in each?"
            )
            assert words in results[-1].stderr
            break
    assert len(results) == lives and (results[-1].returncode == 0) == (lives == 12)


def test_preempted_lives_do_not_count(tmp_path):
    """But what one of them has saved is progress: the lives before and after are not in a row."""
    lives = [("saves", "None"), ("", "None"), ("saves", "2020-01-03T23:00:00"), ("", "None")]
    lives += [("", "2020-01-05T23:00:00"), ("", "None")]
    for day, (saves, preempted) in enumerate(lives, 1):
        if saves:
            (tmp_path / "snapshot.pt").write_text(f"{day}")
        result = requeue(tmp_path, day=day, preempted=preempted)
        last = day == len(lives)  # the second in a row that has saved nothing and was not preempted
        assert result.returncode == last, (day, result)


def test_lives_of_an_earlier_job_do_not_count(tmp_path):
    """Of one with the same number, on a cluster before this one."""
    (tmp_path / "snapshot.pt").touch()
    assert [requeue(tmp_path, day=day).returncode for day in (1, 2, 3)] == [0, 0, 1]
    assert [requeue(tmp_path, day=day).returncode for day in (1, 2, 3)] == [0, 0, 1]


@pytest.mark.long
def test_gpus_that_slurm_loses(cluster, shell):
    """The job is requeued while a node is silent, which Slurm then gives up, and completes.

    Slurm before 23.02.2 starts it without GPUs, as docs/elastic_job.md explains.
    """
    (shell.folder / "waits.py").write_text("""import os, time
print("starts")
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(1000)
""")
    job = cluster(
        """
        options="--nodes=2 --gpus-per-node=1"
        job=$(sbatch --parsable $options slurm/elastic_ddp.sbatch ./waits.py)
        until grep -qs starts elastic_ddp-$job.out; do sleep 0.1; done
        power off node2
        scontrol requeue $job
        until sinfo --noheader --nodes=node2 --format=%t | grep -q down; do sleep 0.1; done
        power on node2
        sinfo --version
        """,
        "-n 2 -g 2",
    )
    assert job.wait() == 0, job.output
    output = log(shell.folder, "elastic_ddp")
    if "slurm 22.05" in job.output:
        assert "Slurm has started the job without its GPUs" in output, output


@pytest.mark.nightly
def test_what_a_job_inherits(ranks, shell):
    """The memory of an salloc around it, a module in place of a file, and what cannot run."""
    (shell.folder / "package").mkdir()
    (shell.folder / "package" / "train.py").write_text(RANKS)
    inner = "salloc -N1 --mem=1G sbatch --nodes=1"
    job = ranks(
        f"""
        {inner} --gpus-per-node=2 slurm/multinode.sbatch -m package.train
        sed '/^#SBATCH.*gpu/d' slurm/multinode.sbatch > cpu.sbatch
        {inner} --output=no-gpus.out cpu.sbatch || true
        . .venv/bin/activate
        srun --nodes=2 --ntasks=4 --gres=gpu:2 ./slurm/torchrun_script.sh multinode.py || true
        """,
        "-n 2",
    )
    job.wait()
    assert sorted(ranks_in(log(shell.folder, "multinode"))) == ["rank 0 of 2", "rank 1 of 2"]
    assert "ask for GPUs, as with --gpus-per-node=4" in (shell.folder / "no-gpus.out").read_text()
    assert "torchrun_script.sh: use --ntasks-per-node=1" in job.output


@pytest.mark.long
def test_tasks_are_not_bound_to_one_cpu(cluster, shell):
    """Where Slurm binds tasks by default, torchrun and its ranks still have all CPUs of the job.

    In a job file of one's own, and in an interactive step, they have with what launchers.md adds.
    """
    cpus = os.cpu_count()
    for path in shell.folder.glob("*.py"):
        path.unlink()
        path.write_text("import os; print('CPUs:', len(os.sched_getaffinity(0)))")
    tool = shell.folder / "slurm" / "pocket-cluster"
    text = tool.read_text().replace("task/none", "task/affinity\nTaskPluginParam=autobind=threads")
    tool.rename(tool.with_name("original"))
    tool.write_text(text.replace("CPUs={8 * self.gpus}", f"CPUs={cpus}"))
    tool.chmod(0o755)
    page = (ROOT / "docs" / "launchers.md").read_text()
    (export,) = re.findall(r"`(export SRUN_CPUS_PER_TASK=.*?)`", page)
    (option,) = re.findall(r"`(--cpu-bind=.*?)`", page)
    job = cluster(
        f"""
        export SBATCH_GPUS_PER_NODE=1
        for file in slurm/*.sbatch; do sbatch --nodes=1 --cpus-per-gpu={cpus} $file; done
        own="sbatch --ntasks=1 --cpus-per-task={cpus} --output=%x.out --wrap"
        $own 'srun python3 multinode.py' --job-name=bound
        $own '{export}; srun python3 multinode.py' --job-name=own
        . .venv/bin/activate
        srun --gres=gpu:1 --cpus-per-gpu={cpus} {option} slurm/torchrun_script.sh multinode.py
        """,
        "-n 1",
    )
    assert job.wait() == 0, job.output
    assert re.findall("CPUs: .*", job.output) == [f"CPUs: {cpus}"]
    logs = {path.name: path.read_text() for path in shell.folder.glob("*.out")}
    assert len(logs) == 9
    for name, text in logs.items():
        number = 1 if name == "bound.out" else cpus
        assert re.findall("CPUs: .*", text) == [f"CPUs: {number}"], name


@pytest.mark.long
def test_failure_fails_the_job(cluster, shell):
    """A rank that raises on one node ends the job on both; its traceback is in the log."""
    (shell.folder / "fails.py").write_text("""import os, sys, time
if os.environ["RANK"] == "3":
    raise RuntimeError(f"no such luck {sys.argv[1:]}")
time.sleep(1000)
""")
    job = cluster("sbatch --gpus-per-node=2 slurm/multinode.sbatch ./fails.py 50 10")
    assert job.wait() == 1
    assert "FAILED" in job.output
    assert "RuntimeError: no such luck ['50', '10']" in log(shell.folder, "multinode")


@pytest.mark.long
def test_submit_and_time_limit(cluster, shell):
    """At the signal that submitit asks for, every rank saves, and the job is requeued."""
    patch(shell.folder, "preemptible.py", PAUSE)
    job = cluster(
        """
        source .venv/bin/activate
        export SBATCH_PARTITION=none
        python slurm/submit.py --nodes 2 --partition main preemptible.py 4 2 | tee printed
        job=$(awk '/^job/ { print $2 }' printed)
        until grep -qs "^2 [1-9]" trained.log; do sleep 0.1; done
        scancel --signal=USR2 $job
        """,
        "-n 2",
    )
    assert job.wait() == 0, job.output
    steps = [(epoch, samples) for epoch in range(4) for samples in range(0, 2048, 64)]
    assert trained(shell.folder) == steps, job.output
    logs = [path.read_text() for path in (shell.folder / "logs").glob("*_log.out")]
    assert sum(text.count("epochs done") for text in logs) == 2, logs


@pytest.mark.long
def test_submit_and_a_stop_by_hand(cluster, shell):
    """The job saves and ends, instead of keeping its GPUs until the time limit."""
    patch(shell.folder, "preemptible.py", PAUSE)
    job = cluster(
        """
        source .venv/bin/activate
        python slurm/submit.py --nodes 2 preemptible.py 400 400 | tee printed
        until grep -qs "^0 [1-9]" trained.log; do sleep 0.1; done
        scancel --signal=TERM $(awk '/^job/ { print $2 }' printed)
        """,
        "-n 2",
    )
    job.wait()
    assert "FAILED" in job.output and (shell.folder / "snapshot.pt").exists(), job.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pocket-cluster -n 0", "--nodes and --gpus must be 1 or more"),
        ("pocket-cluster -b 1", "--bandwidth must be like 100mbit (kbit, mbit or gbit)"),
        ("pocket-cluster no-such-command", "there is no command no-such-command"),
        ("submit.py --nodes 0 multinode.py", "argument --nodes: must be 1 or more, not 0"),
        ("submit.py --cluster local nosuch.py", "there is no nosuch.py here"),
        ("submit.py multinode.py", "there is no Slurm here (no sbatch): log in to a cluster, or"),
    ],
)
def test_bad_input(command, message):
    path = "/nowhere" if command.startswith("submit") else os.environ["PATH"]
    result = run(sys.executable, *f"slurm/{command}".split(), env={"PATH": path})
    assert result.returncode != 0
    program = command.split()[0]
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith((f"{program}: error: {message}", f"{program}: {message}"))


@pytest.mark.nightly
def test_gpus_of_this_machine(shell):
    """Submitted to it, each node gets the next of those that CUDA_VISIBLE_DEVICES names."""
    printing = "import os\nprint('GPUs', os.environ['CUDA_VISIBLE_DEVICES'])\n"
    (shell.folder / "gpus.py").write_text(printing)
    command = f"python {ROOT}/slurm/submit.py --nodes 2 --cluster local ./gpus.py"
    shell.run(command, CUDA_VISIBLE_DEVICES="6,4,5")
    limit = TimeLimit()
    while True:
        logs = "".join(path.read_text() for path in shell.folder.glob("logs/*.out"))
        if "GPUs 6\n" in logs and "GPUs 4\n" in logs:
            return
        assert not limit.passed(), logs
        time.sleep(0.1)


def test_pocket_cluster_without_slurm(tmp_path):
    for tool in ("env", "unshare", "ip", "tc"):
        (tmp_path / tool).symlink_to(shutil.which(tool, path="/usr/bin:/bin:/usr/sbin:/sbin"))
    program = (ROOT / "slurm" / "pocket-cluster").read_text()
    copy = tmp_path / "pocket-cluster"
    copy.write_text(program.replace(":/usr/sbin:/sbin:/usr/local/sbin", ""))
    result = run(sys.executable, copy, env={"PATH": str(tmp_path)})
    assert result.returncode == 1
    assert result.stderr == (
        "pocket-cluster: not installed: munge slurm-wlm. "
        "Try: sudo apt-get install munge slurm-wlm\n"
    )


@pytest.mark.nightly
def test_lines_for_job_files(ranks, shell):
    """The lines of docs/job_files.md and launchers.md: a record, logs of the ranks, a container.

    What stands for Apptainer runs torchrun outside of any container.
    """
    job_file = (ROOT / "slurm" / "multinode.sbatch").read_text()
    record = snippet("job_files.md", "git log")
    job_file = job_file.replace("srun --label", f"{record}srun --label")
    (shell.folder / "container.sbatch").write_text(job_file)
    (shell.folder / "slurm" / "site.sh").write_text(snippet("launchers.md", "apptainer exec"))
    apptainer = shell.folder / "bin" / "apptainer"
    apptainer.parent.mkdir()
    apptainer.write_text(
        '#!/bin/bash\n[ "${*:1:5}" = "exec --nv --bind /scratch multinode.sif" ] || exit 2\n'
        'echo "in the container: $6"; exec "${@:6}"\n'
    )
    apptainer.chmod(0o755)
    job = ranks(
        f"""
        export PATH="$PWD/bin:$PATH" PET_LOG_DIR=logs PET_TEE=3
        export WANDB_API_KEY=secret1 HF_TOKEN=secret2 NCCL_PSK=secret3 NCCL_DEBUG=INFO
        cat >tasks.py <<< 'import os; print("rank", os.environ["RANK"])'
        mkdir logs
        sed 's|--label|--output=logs/%x-%j-%t.out|' slurm/multinode_srun.sbatch >tasks.sbatch
        sbatch --nodes=1 --gpus-per-node=2 container.sbatch
        {ALL_DONE}
        rm slurm/site.sh
        sbatch --nodes=1 --gpus-per-node=2 tasks.sbatch tasks.py
        sbatch --nodes=1 --output=missing/%j.out --wrap hostname
        {ALL_DONE}
        scontrol show job
        """,
        "-n 2 -g 2",
    )
    job.wait()
    output = log(shell.folder, "multinode")
    assert "torch 2." in output and "NCCL_DEBUG=INFO\n" in output and "PET_TEE=3\n" in output
    assert "secret" not in output
    assert "0: in the container: torchrun\n" in output
    for rank in range(2):
        assert f"[default{rank}]:rank {rank} of 2" in output, output
        (path,) = shell.folder.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        assert path.read_text() == f"rank {rank} of 2\n"
        (path,) = shell.folder.glob(f"logs/multinode_srun-*-{rank}.out")
        assert path.read_text() == f"rank {rank}\n"
    assert "Reason=JobLaunchFailure" in job.output and "ExitCode=0:53" in job.output, job.output


@pytest.mark.nightly
@pytest.mark.skipif(
    not shutil.which("mpirun"), reason="get it with: sudo apt-get install openmpi-bin"
)
def test_mpirun(cluster, shell):
    """docs/launchers.md: mpirun's 2 x 2 ranks train as those of two torchruns by hand.

    `on` stands for ssh, by which mpirun sends one string as a command.
    """
    shutil.copytree(ROOT / "slurm" / "schedulers", shell.folder / "slurm" / "schedulers")
    node = shell.folder / "slurm" / "schedulers" / "node.sh"
    node.write_text(node.read_text().replace("=gpu", "=2"))
    agent = shell.folder / "agent"
    agent.write_text('#!/bin/sh\nnode=$1; shift; exec on "$node" sh -c "$*"\n')
    agent.chmod(0o755)
    torchrun = "torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d"
    torchrun += " --rdzv_endpoint=node1:29400 preemptible.py 4 2 --snapshot_path by_hand.pt"
    job = cluster(
        f"""
        export OMPI_MCA_plm_rsh_agent=$PWD/agent
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        slurm/schedulers/mpirun.sh node1,node2 preemptible.py 4 2 --snapshot_path mpirun.pt
        . .venv/bin/activate
        on node1 {torchrun} &
        on node2 {torchrun}
        wait $!
        """
    )
    assert job.wait() == 0, job.output
    for node in (1, 2):
        assert len(re.findall(rf">:rank . of 4 on node{node} starts", job.output)) == 2, job.output
    assert_trained(shell.folder / "by_hand.pt", 4, 128)
    assert weights_diff(shell, "mpirun.pt", "by_hand.pt") < 1e-6


@pytest.mark.parametrize(
    "command, status", [("node.sh 0.1s 1 node1 1 x.py", 124), ("sge.sh", 7), ("pbs.sh", 1)]
)
def test_stopped_job_is_not_a_success(tmp_path, command, status):
    """docs/launchers.md: when the time is up, or the second of three nodes has failed."""
    shutil.copytree(ROOT / "slurm" / "schedulers", tmp_path / "slurm" / "schedulers")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").touch()
    texts = {
        "torchrun": "exec sleep 60",
        "qrsh": "cat; exit $2",  # of qrsh -inherit NODE, the node
        "pbsdsh": 'shift; "$1" "$2" "$3" "$4" false; true',  # a node fails, and nothing tells
    }
    for name, text in texts.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "hosts").write_text("0\n7\n0\n")
    path = f"{programs}:{os.environ['PATH']}"
    environment = {"PATH": path, "PE_HOSTFILE": "hosts", "NHOSTS": "2", "JOB_ID": "1"}
    environment |= {"PBS_O_WORKDIR": ".", "PBS_NODEFILE": "hosts", "PBS_JOBID": "1.server"}
    job = run("bash", *f"slurm/schedulers/{command}".split(), folder=tmp_path, env=environment)
    assert job.returncode == status, job
