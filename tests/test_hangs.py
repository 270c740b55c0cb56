"""What docs/hangs.md says that one sees when something is wrong, provoked on two nodes."""

import pytest
import torch
import torch.distributed as dist
from helpers import documented_error, needs_slurm
from torch import nn

# Two scripts that do no more than is needed here, since torch takes its time to start as it is.
INIT = """import torch.distributed as dist
dist.init_process_group("gloo")
print("initialized")
"""
UNEVEN = """import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
dist.barrier()
"""
TWO_NODES = """
source .venv/bin/activate
export OMP_NUM_THREADS=1 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=node1:29400
"""


@needs_slurm
def test_rendezvous_fails(cluster, shell):
    """A job file without srun; an endpoint that is another on each node; a firewall.

    Also, two job files that Slurm refuses, or that do not find the environment.
    """
    (shell.folder / "init").write_text(INIT)
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
        (cd slurm && sbatch --output={shell.folder}/folder.out singlegpu.sbatch)
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
    no_environment = documented_error(".venv/bin/activate: No such file or directory")
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


def test_rendezvous_forgotten(shell):
    """torchrun waits for the other node at a rendezvous of its own, by default for 15 minutes."""
    (shell.folder / "init").write_text(INIT)
    job = shell.start("torchrun --nnodes=2 --rdzv_conf=timeout=2 init")
    assert job.wait() == 1
    lines = job.output.splitlines()
    assert lines[-1].endswith(documented_error("waiting for clients. 1/2 clients joined."))


@needs_slurm
def test_every_node_calls_itself_loopback(cluster, shell):
    """They cannot find each other, until the interface is named."""
    (shell.folder / "init").write_text(INIT)
    look = "; ".join(
        [
            "getent hosts $(hostname)",
            "ip -br address",
            "ss -ltn",
        ]
    )
    job = cluster(
        f"""{TWO_NODES}
        both() {{
          for node in node1 node2; do
            sed "s/^.* $node$/127.0.1.1 $node/" /etc/hosts >hosts-$node
            wrong="mount --bind hosts-$node /etc/hosts"
            on $node unshare --mount bash -c "$wrong; $1" >$2-$node.out 2>&1 &
          done
        }}
        both '{look}' look; wait
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

    assert "127.0.1.1" in both("look") and "eth0" in both("look")
    assert documented_error("Gloo connectFullMesh failed") in both("loopback")
    assert documented_error("Connection refused, remote=[127.0.1.1]") in both("loopback")
    assert both("mended").count("initialized\n") == 2


def test_no_such_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch")
    with pytest.raises(RuntimeError) as error:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert documented_error("Unable to find address for: nosuch") in str(error.value)


def test_one_rank_is_a_step_ahead(shell):
    (shell.folder / "uneven").write_text(UNEVEN)
    asked = "export TORCH_DISTRIBUTED_DEBUG=DETAIL\nexport NCCL_DEBUG=INFO"
    job = shell.start(f"{asked}\ntorchrun --standalone --nproc_per_node=2 uneven")
    assert job.wait() != 0
    assert documented_error("Detected mismatch between collectives on ranks") in job.output


def test_no_environment(shell):
    """In a shell that does not know .venv; and with a Python that has no packages."""
    bash = shell.start("exec /bin/bash -c 'torchrun multinode.py'", PATH="/nowhere")
    assert bash.wait() != 0
    assert bash.output.endswith(documented_error("torchrun: command not found") + "\n")
    python = shell.start("python -S -I singlegpu.py 50 10")
    assert python.wait() == 1
    error = documented_error("ModuleNotFoundError: No module named 'torch'")
    assert python.output.endswith(error + "\n")


def test_epochs_by_name(shell):
    job = shell.start("python singlegpu.py --epochs 50")
    job.fails(documented_error("error: unrecognized arguments: --epochs"))


def test_unused_parameters():
    """DDP raises, and does not if it is told."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for told in (True, False):
            branches = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            model = nn.Sequential(branches[0], branches[1])
            model.forward = branches[0].forward
            model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=told)
            model(torch.ones(1, 2)).sum().backward()
            if told:
                model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    message = documented_error(
        "Expected to have finished reduction in the prior iteration before starting a new one."
    )
    assert message in str(error.value)
