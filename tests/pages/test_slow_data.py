"""docs/slow_data.md: a ZIP file in the place of many files, as the page's code reads it."""

import ast
import os
import re
import sys

import pytest
import torch
from helpers import ALL_DONE, fences, needs_slurm, patch, resize, run, snippet, weights_diff
from torch.utils.data import DataLoader

import singlegpu
from tools.steps import ROOT

PAGE = (ROOT / "docs" / "slow_data.md").read_text()
ZIPPED, SAMPLES, STREAM = fences("slow_data.md", "python")
SIZE = 256
# For `patch`: trains on zipped samples, and writes down which it reads.
ZIPPED_SAMPLES = f"""
import io
{ZIPPED}
{SAMPLES}
class RecordedSamples(Samples):
    def __getitem__(self, index):
        with open(os.environ["READ"], "ab", buffering=0) as file:
            file.write(b"%d\\n" % index)
        return super().__getitem__(index)
script.ToyDataset = lambda size: RecordedSamples(os.environ["DATA"])
"""
# Two ranks with two workers each; shard n holds 10 + n samples, of which the ranks get 50 and 41.
STREAMED = f"""
import itertools, torch, torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
{STREAM}
dist.init_process_group("gloo")
stream = Stream(range(7), lambda number: range(100 * number, 101 * number + 10))
loader = DataLoader(stream, 4, drop_last=True, num_workers=2, multiprocessing_context="fork")
for batch in until_one_ends(loader, None):
    print(f"{{dist.get_rank()}}: {{batch.tolist()}}\\n", end="")
dist.barrier()
"""


def pack(folder, name):
    """Types the command of the page, for a folder with this name."""
    (command,) = re.findall(r"^python (-m zipfile .*)", PAGE, re.M)
    arguments = command.replace("docs", name).split()
    assert run("python", *arguments, folder=folder).returncode == 0


def pack_samples(folder):
    """Writes the samples of the toy data set into a file each, and packs these."""
    (folder / "data").mkdir()
    dataset = singlegpu.ToyDataset(SIZE)
    for index in range(SIZE):
        tensors = tuple(tensor.clone() for tensor in dataset[index])
        torch.save(tensors, folder / "data" / f"{index:06}.pt")
    pack(folder, "data")


def assert_each_sample_once(path):
    assert sorted(map(int, path.read_text().split())) == list(range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
def test_zipped_are_the_files(tmp_path, monkeypatch, workers):
    """Byte for byte, also in forked workers of a process that has read from the file itself."""
    files = {"files/empty": b"", "files/a/b/Größe 你好": b"x", "files/large": os.urandom(3_000_000)}
    files |= {f"files/c/{number}": os.urandom(10 * number) for number in range(500)}
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pack(tmp_path, "files")
    (tmp_path / "zipped.py").write_text(ZIPPED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zipped", raising=False)
    import zipped

    dataset = zipped.ZippedFiles(tmp_path / "files.zip")
    assert dict(dataset[index] for index in range(len(dataset))) == files
    context = "fork" if workers else None
    loader = DataLoader(dataset, None, num_workers=workers, multiprocessing_context=context)
    read = list(loader)
    assert len(read) == len(files) and dict(read) == files


def test_trains_as_before(tmp_path, shell):
    """Two ranks read each sample once, and get the weights of multinode.py."""
    pack_samples(tmp_path)
    script = patch(tmp_path, "multinode.py", resize(SIZE))
    plain = shell.ranks(f"{script} 1 1 --snapshot_path plain.pt", 2)
    script = patch(tmp_path, "multinode.py", ZIPPED_SAMPLES, "zipped.py")
    command = f"{script} 1 1 --snapshot_path zipped.pt"
    shell.ranks(command, 2, DATA="data.zip", READ="read").succeeds()
    plain.succeeds()
    assert_each_sample_once(tmp_path / "read")
    assert weights_diff(shell, "zipped.pt", "plain.pt") == 0


def test_stream_ends_on_all_ranks(tmp_path, shell):
    """Both take as many batches as the one with fewer samples has, and no sample twice."""
    (tmp_path / "streamed.py").write_text(STREAMED)
    output = shell.ranks(f"{tmp_path}/streamed.py", 2).succeeds()
    batches = dict.fromkeys("01", 0)
    samples = []
    for line in output.splitlines():
        rank, _, batch = line.partition(": ")
        batches[rank] += 1
        samples += ast.literal_eval(batch)
    assert batches == {"0": 10, "1": 10}
    assert len(samples) == len(set(samples)) == 80


@pytest.mark.nightly
@needs_slurm
def test_job_copies_to_each_node(cluster, shell):
    """With the page's lines, torchrun's ranks read their node's own copy, which is then gone."""
    pack_samples(shell.folder)
    patch(shell.folder, "multinode.py", ZIPPED_SAMPLES, "zipped.py")
    job_file = (ROOT / "slurm" / "multinode.sbatch").read_text()
    copying = snippet("slow_data.md", "export DATA")
    lines = job_file.replace("srun --label", copying + "srun --label")
    assert lines != job_file
    (shell.folder / "cp.sbatch").write_text(lines)
    with_sbcast = re.search(r"`(sbcast .*?)`", PAGE)[1]
    lines = re.sub("^srun .* cp .*", with_sbcast, lines, flags=re.M)
    (shell.folder / "sbcast.sbatch").write_text(lines)
    submit = "sbatch --gpus-per-node=1"
    training = "zipped.py 1 1 --num_workers 2 --snapshot_path"
    job = cluster(
        f"""
        export SLURM_TMPDIR=/dev/shm  # each node of this cluster has its own
        READ=read_cp {submit} cp.sbatch {training} cp.pt
        READ=read_sbcast {submit} sbcast.sbatch {training} sbcast.pt
        {ALL_DONE}
        srun -N2 bash -c 'echo left: /dev/shm/*'
        """,
        "-n 2",
    )
    assert job.wait() == 0, job.output
    assert job.output.count("left: /dev/shm/*\n") == 2, job.output
    for name in ("read_cp", "read_sbcast"):
        assert_each_sample_once(shell.folder / name)
