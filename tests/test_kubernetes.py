"""The manifest for Kubernetes: its fields are those of the API, and its command trains."""

import re
import shlex

import pytest
import yaml
from helpers import assert_trained
from kubeflow_trainer_api.models.io_k8s_api_core_v1_persistent_volume_claim import (
    IoK8sApiCoreV1PersistentVolumeClaim,
)
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from tools.launch.jobs import free_port
from tools.steps import ROOT

MANIFEST = (ROOT / "kubernetes" / "multinode.yaml").read_text()
KINDS = {
    ("v1", "PersistentVolumeClaim"): IoK8sApiCoreV1PersistentVolumeClaim,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TrainerV1alpha1TrainJob,
}


def check(text):
    """Returns the objects of a manifest; raises ValueError if one is not as the API has it."""
    objects = list(yaml.safe_load_all(text))
    for content in objects:
        kind = (content["apiVersion"], content["kind"])
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind}")
        # The model checks types and required fields, but leaves out what it does not know.
        if KINDS[kind].from_dict(content).to_dict() != content:
            raise ValueError(f"{kind} has a field that the API does not have")
    return objects


def test_fields_are_those_of_the_api():
    claim, job = check(MANIFEST)
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(trainer["numProcPerNode"])
    # The runtime torch-distributed has one replicated job, `node`, with one container, `node`.
    (patch,) = job["spec"]["runtimePatches"]
    (replicated_job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated_job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert replicated_job["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["snapshots"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert trainer["command"][-1].rpartition("/")[0] == mounts["snapshots"]


def test_image_has_the_script_and_the_tested_torch():
    commands = (ROOT / "kubernetes" / "Dockerfile").read_text()
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    # Where the newest torch is tried, none is pinned.
    assert not pin or f"FROM pytorch/pytorch:{pin[1]}-cuda" in commands
    _, job = check(MANIFEST)
    script = job["spec"]["trainer"]["command"][1]
    copied = next(line.split()[1:-1] for line in commands.splitlines() if line[:5] == "COPY ")
    assert script in copied
    assert all((ROOT / name).is_file() for name in copied)


@pytest.mark.long
def test_command_trains_with_the_variables_of_kubeflow(shell):
    """On each of two nodes, with one process: no other option, and the weights of one process.

    Kubeflow Trainer sets these variables in pkg/runtime/framework/plugins/torch/torch.go.
    """
    _, job = check(MANIFEST)
    trainer = job["spec"]["trainer"]
    command = shlex.join(trainer["command"]).replace("/snapshots/", "")
    assert command.startswith("torchrun multinode.py 50 10 ")
    command = command.replace("50 10", "10 5")
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    port = str(free_port())
    jobs = [
        shell.start(
            command,
            **variables,
            PET_NNODES=str(trainer["numNodes"]),
            PET_NPROC_PER_NODE="1",
            PET_NODE_RANK=str(node_rank),
            PET_MASTER_ADDR="localhost",
            PET_MASTER_PORT=port,
        )
        for node_rank in range(trainer["numNodes"])
    ]
    outputs = [job.succeeds() for job in jobs]
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2 starts on" in output
    assert_trained(shell.folder / "multinode.pt", 10, 64)
