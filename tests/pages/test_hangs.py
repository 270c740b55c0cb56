"""What docs/errors.md says that one sees when it fails or hangs, provoked."""

import socket
import sys

import pytest
import torch
import torch.distributed as dist
from helpers import documented_error, long, needs_slurm, patch, snippet
from rankcheck.launch.jobs import free_port
from terminal import Terminal, agrees
from torch import nn

from tools.steps import ROOT

INIT = """import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
"""
# What the tests start; no more than is needed, since torch takes its time to start as it is.
SCRIPTS = {
    "init": f'{INIT}print("initialized")',
    # Rank 0 calls a collective more than rank 1.
    "uneven": f"""{INIT}if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
dist.barrier()
""",
    "sizes": f'{INIT}dist.all_reduce(torch.ones(1 + 1000 * int(os.environ["RANK"])))',
    # DDP on one rank, with what wraps each process group for the comparison of collectives.
    "ddp": """import faulthandler, torch, torch.distributed as dist
faulthandler.enable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
""",
    # Saves what NCCL's watchdog would save; gloo's record lacks only the process group's name.
    "recorded": f"""{INIT}import pickle, sys
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
else:
    work = dist.barrier(async_op=True)
record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
record["pg_config"] = {{"0": {{"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}}}
with open(f"{{sys.argv[1]}}/rank_{{dist.get_rank()}}", "wb") as file:
    pickle.dump(record, file)
print("saved", flush=True)
work.wait()
""",
}
TORCHRUN = "torchrun --standalone --nproc_per_node=2"
TWO_NODES = """
source .venv/bin/activate
export OMP_NUM_THREADS=1 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=node1:29400
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)


@needs_slurm
@pytest.mark.long
def test_rendezvous_fails(cluster, shell):
    """A job file without srun; an endpoint that is another on each node; a firewall.

    Also, two job files that Slurm refuses, or that do not find the environment.
    """
    (shell.folder / "wrong.sbatch").write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --gpus-per-node=1 --output=wrong.out\n"
        "source .venv/bin/activate\n"
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=$(hostname):29500 init\n"
    )
    job = cluster(
        f"""{TWO_NODES}
        export PET_RDZV_CONF=join_timeout=6,read_timeout=3,timeout=3
        sbatch wrong.sbatch
        sbatch --gpus-per-node=9 slurm/singlegpu.sbatch || true
        mkdir elsewhere && cp -r slurm elsewhere
        (cd elsewhere && sbatch --output={shell.folder}/folder.out slurm/singlegpu.sbatch)
        for node in node1 node2; do
          PET_RDZV_ENDPOINT=localhost:29400 on $node torchrun --nnodes=2 init >$node.out 2>&1 &
        done
        wait
        address=$(getent hosts node1 | cut -d " " -f 1)
        on node2 ip route add blackhole $address
        on node2 torchrun --nnodes=2 init >firewall.out 2>&1 || true
        """
    )
    job.wait()
    assert documented_error("Requested node configuration is not available") in job.output
    no_environment = documented_error("there is no .venv: write slurm/site.sh")
    assert no_environment in (shell.folder / "folder.out").read_text()
    waited = documented_error("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError")
    for name in ("wrong", "node1", "node2"):
        output = (shell.folder / f"{name}.out").read_text()
        # Nothing is printed before.
        assert output.startswith("Traceback") and output.splitlines()[-1] == waited, output
    output = (shell.folder / "firewall.out").read_text()
    assert (
        documented_error("RendezvousConnectionError: The connection to the C10d store has failed")
        in output
    )


@needs_slurm
@pytest.mark.nightly
def test_endpoint_by_a_second_address(cluster, shell):
    """No torchrun finds it among its own names; all may host the store, and one is connected to."""
    job = cluster(
        f"""{TWO_NODES}
        on node1 ip address add 10.78.0.1/24 dev eth0
        on node2 ip address add 10.78.0.2/24 dev eth0
        both() {{ for node in node1 node2; do on $node torchrun --nnodes=2 init & done; }}
        export PET_RDZV_ENDPOINT=10.78.0.1:29400 PET_RDZV_CONF=join_timeout=6,read_timeout=3
        both >unknown.out 2>&1; wait
        {snippet("errors.md", "is_host", "sh")}
        both >host.out 2>&1; wait
        """
    )
    job.wait()
    unknown = (shell.folder / "unknown.out").read_text()
    assert unknown.count("RendezvousConnectionError: The connection to the C10d store") >= 2
    assert (shell.folder / "host.out").read_text().count("initialized") == 2


@needs_slurm
@pytest.mark.nightly
def test_every_node_calls_itself_loopback(cluster, shell):
    """They cannot find each other, until the interface is named."""
    job = cluster(
        f"""{TWO_NODES}
        both() {{
          for node in node1 node2; do
            sed "s/^.* $node$/127.0.1.1 $node/" /etc/hosts >hosts-$node
            wrong="mount --bind hosts-$node /etc/hosts"
            on $node unshare --mount bash -c "$wrong; $1" >$2-$node.out 2>&1 &
          done
        }}
        both 'torchrun --nnodes=2 init' loopback
        # One of the two may go on waiting, for half an hour.
        until grep -q "Gloo connectFullMesh failed" loopback-*; do sleep 0.1; done
        export GLOO_SOCKET_IFNAME=eth0 PET_RDZV_ENDPOINT=node1:29500
        both 'torchrun --nnodes=2 init' mended
        until [ $(cat mended-* | grep -c initialized) = 2 ]; do sleep 0.1; done
        """
    )
    job.succeeds()

    def both(name):
        return "".join((shell.folder / f"{name}-node{n}.out").read_text() for n in (1, 2))

    assert documented_error("Gloo connectFullMesh failed") in both("loopback")
    assert documented_error("Connection refused, remote=[127.0.1.1]") in both("loopback")
    assert both("mended").count("initialized\n") == 2


def test_no_such_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    with pytest.raises(RuntimeError) as error:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert documented_error("Unable to find address for: nosuch") in str(error.value)


# Commands, and what they print, or one of their ranks does, before they fail.
FAILURES = [
    (
        "PATH=/nowhere /bin/bash -c 'torchrun multinode.py'",
        documented_error("torchrun: command not found"),
    ),
    (
        "python -S -I singlegpu.py 50 10",
        documented_error("ModuleNotFoundError: No module named 'torch'"),
    ),
    (
        "python singlegpu.py --epochs 50",
        documented_error("error: unrecognized arguments: --epochs"),
    ),
    *long(
        (
            # torchrun waits for the other node, by default for 15 minutes.
            "torchrun --nnodes=2 --rdzv_conf=timeout=2 init",
            documented_error("waiting for clients. 1/2 clients joined."),
        ),
        (
            "python -m torch.distributed.launch --nproc_per_node=1 multinode.py 50 10",
            documented_error("error: unrecognized arguments: --local-rank=0"),
        ),
        (
            f"TORCH_DISTRIBUTED_DEBUG=DETAIL {TORCHRUN} uneven",
            documented_error("Detected mismatch between collectives on ranks"),
        ),
        (
            "TORCH_DISTRIBUTED_DEBUG=DETAIL python ddp",
            documented_error("Fatal Python error: Segmentation fault"),
        ),
    ),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure[0])
def test_failure(shell, failure):
    command, error = failure
    # By default, torchrun's port is 29500: another test may use it.
    job = shell.start(command, PET_MASTER_PORT=str(free_port()))
    assert job.wait() != 0
    assert error in job.output


@pytest.mark.long
def test_address_in_use(shell):
    with socket.create_server(("", 0)) as server:
        job = shell.start(f"torchrun --master_port={server.getsockname()[1]} init")
        job.fails(
            documented_error("The server socket has failed to listen on any local network address"),
            documented_error("message: address already in use"),
        )


def test_collectives_of_different_sizes(shell):
    """gloo notices where they meet, and ends."""
    job = shell.ranks(f"{shell.folder}/sizes", 2)
    assert job.wait() != 0
    error = documented_error("Is there a distributed collective mismatch in your code?")
    assert error in job.output


def test_unused_parameters():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    branches = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    branches.forward = branches[0].forward
    model = nn.parallel.DistributedDataParallel(branches)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(1, 2))
    message = documented_error(
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    assert message in str(error.value)


# What that page shows, and test_path.py does not type.


def shown(start):
    """Returns the output on that page that contains `start`."""
    return snippet("errors.md", start, "text")


@pytest.mark.long
def test_rank_fails(shell):
    """torchrun shows the traceback and saves it if main has @record, or else only redirects it."""
    no_traceback = shown("  error_file")
    fail = "def fail(*args):\n    raise ValueError('no loss')\n"
    (shell.folder / "without").write_text(f"{fail}fail()")
    patch(shell.folder, "multigpu_torchrun.py", f"{fail}script.Trainer.train = fail", "with")
    for name, saved in (("without", "stderr.log"), ("with", "error.json")):
        job = shell.start(f"torchrun --standalone --log-dir {name}.logs --redirects 3 {name} 5")
        assert job.wait() == 1
        (file,) = (shell.folder / f"{name}.logs").glob(f"*/attempt_0/0/{saved}")
        assert "ValueError: no loss" in file.read_text()
        first_failure = documented_error("Root Cause (first observed failure):")
        root_cause = job.output.partition(first_failure)[2]
        assert (no_traceback in root_cause) == (name == "without")
        assert ("ValueError: no loss" in root_cause) == (name == "with")


@pytest.mark.long
def test_flight_recorder(shell):
    """The analyzer finds the difference, in records of gloo instead of NCCL."""
    (shell.folder / "traces").mkdir()
    job = shell.start(f"{TORCHRUN} recorded traces", TORCH_FR_BUFFER_SIZE="2000")
    job.wait_for("saved", times=2)
    analyzer = shell.start("torchfrtrace --prefix rank_ traces")
    assert analyzer.wait() == 0 and agrees(analyzer.output, shown("collective: "))


@pytest.mark.path
def test_debugger(shell):
    terminal = Terminal(shell.folder)
    terminal.run(f". {sys.prefix}/bin/activate")
    source = (ROOT / "multinode.py").read_text()
    stopped = "        dist.breakpoint(rank=0)\n        loss.backward()"
    (shell.folder / "stopped.py").write_text(source.replace("        loss.backward()", stopped))
    terminal.enter(f"{TORCHRUN} stopped.py 1 1")
    for command in ("up", "p inputs.shape, loss", "c"):
        terminal.sees(r"\(Pdb\) $")
        terminal.enter(command)
    terminal.sees(r"(?s)ATTENTION.*\(Pdb\) $")  # the next step
    assert agrees(terminal.output, shown("(Pdb) up"))
    terminal.enter("q")
    assert terminal.status() != 0
    terminal.bash.close(force=True)
    shell.start("python -c 'breakpoint()'").fails("bdb.BdbQuit")  # without a terminal
