"""The manifest for Kubernetes: its fields are those of the API, and its command trains."""

import re
import shlex

import pytest
import yaml
from helpers import assert_trained
from rankcheck.launch.jobs import free_port

from tools.steps import ROOT

MANIFEST = (ROOT / "slurm" / "schedulers" / "kubernetes.yaml").read_text()
CLAIM, JOB = yaml.safe_load_all(MANIFEST)
TRAINER = JOB["spec"]["trainer"]


def test_fields_are_those_of_the_api():
    from kubeflow_trainer_api.models import io_k8s_api_core_v1_persistent_volume_claim as claims
    from kubeflow_trainer_api.models import trainer_v1alpha1_train_job as jobs

    assert (JOB["apiVersion"], JOB["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    for model, content in (
        (claims.IoK8sApiCoreV1PersistentVolumeClaim, CLAIM),
        (jobs.TrainerV1alpha1TrainJob, JOB),
    ):
        # The model checks types and required fields, but leaves out what it does not know.
        assert model.from_dict(content).to_dict() == content
    # The runtime torch-distributed has one replicated job, `node`, with one container, `node`.
    (patch,) = JOB["spec"]["runtimePatches"]
    (replicated_job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated_job["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated_job["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert TRAINER["command"][-1].rpartition("/")[0] == mounts["snapshots"]


def test_image_has_the_script_and_the_tested_torch():
    commands = (ROOT / "slurm" / "schedulers" / "Dockerfile").read_text()
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # Where the newest torch is tried, none is pinned.
    assert not pin or f"FROM pytorch/pytorch:{pin[1]}-cuda" in commands
    script = TRAINER["command"][1]
    copied = next(line.split()[1:-1] for line in commands.splitlines() if line[:5] == "COPY ")
    assert script in copied
    assert all((ROOT / name).is_file() for name in copied)


@pytest.mark.long
def test_command_trains_with_the_variables_of_kubeflow(shell):
    """On each of two nodes, with one process: no other option, and the weights of one process.

    Kubeflow Trainer sets these variables in pkg/runtime/framework/plugins/torch/torch.go.
    """
    command = shlex.join(TRAINER["command"]).replace("/snapshots/", "")
    assert command.startswith("torchrun multinode.py 50 10 ")
    command = command.replace("50 10", "10 5")
    variables = {variable["name"]: variable["value"] for variable in TRAINER["env"]}
    port = str(free_port())
    jobs = [
        shell.start(
            command,
            **variables,
            PET_NNODES=str(TRAINER["numNodes"]),
            PET_NPROC_PER_NODE="1",
            PET_NODE_RANK=str(node_rank),
            PET_MASTER_ADDR="localhost",
            PET_MASTER_PORT=port,
        )
        for node_rank in range(TRAINER["numNodes"])
    ]
    outputs = [job.succeeds() for job in jobs]
    for rank, output in enumerate(outputs):
        assert re.search(rf"rank {rank} of 2 on \S+ starts", output)
    assert_trained(shell.folder / "multinode.pt", 10, 64)
