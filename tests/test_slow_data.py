"""docs/slow_data.md: the code that it shows, recipes/pack_files.py, and bench/small_files.py."""

import io
import os
import pickle
import re
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, load, max_abs_diff, needs_slurm, patched
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import singlegpu
from recipes import pack_files
from recipes.pack_files import PackedFiles

PAGE = (ROOT / "docs" / "slow_data.md").read_text()
WAITS, SAMPLES, SHARDS = (
    next(code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if word in code)
    for word in ("waited", "class Samples", "class TarShards")
)
(JOB_LINES,) = re.findall(r"^```bash\n(export PACKED.*?)^```", PAGE, re.M | re.S)
SIZE = 256
# For `patched`: trains on fewer samples; on packed ones, and writes down which it reads.
FEWER_SAMPLES = f"""
ToyDataset = script.ToyDataset
script.ToyDataset = lambda size: ToyDataset({SIZE})
"""
PACKED_SAMPLES = f"""
import io
from recipes.pack_files import PackedFiles
{SAMPLES}
class RecordedSamples(Samples):
    def __getitem__(self, index):
        with open(os.environ["READ"], "ab", buffering=0) as file:
            file.write(b"%d\\n" % index)
        return super().__getitem__(index)
script.ToyDataset = lambda size: RecordedSamples(os.environ["PACKED"])
"""


def run_main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["pack_files.py", *map(str, arguments)])
    pack_files.main(pack_files.parse_args())


def pack_samples(folder):
    """Writes the samples of the toy data set into a file each, and packs these."""
    (folder / "samples").mkdir()
    dataset = singlegpu.ToyDataset(SIZE)
    for index in range(SIZE):
        tensors = tuple(tensor.clone() for tensor in dataset[index])
        torch.save(tensors, folder / "samples" / f"{index:06}.pt")
    pack_files.pack(folder / "samples", folder / "data.packed")


def assert_each_sample_once(path):
    assert sorted(map(int, path.read_text().split())) == list(range(SIZE))


@pytest.fixture
def files(tmp_path):
    """A folder of files of several kinds, and what they contain."""
    contents = {
        "a/empty": b"",
        "a/b/Größe 你好": b"x",
        "large": os.urandom(3_000_000),
        os.fsdecode(b"no-utf8-\xff"): b"\0\n\r\n",
    }
    contents |= {f"c/{number}": os.urandom(number) for number in range(50)}
    for name, content in contents.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "files" / "link").symlink_to(tmp_path / "files" / "c")
    contents |= {f"link/{number}": contents[f"c/{number}"] for number in range(50)}
    return tmp_path / "files", contents


@pytest.mark.parametrize(
    ("workers", "start"),
    [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.long)],
)
def test_packed_are_the_files(monkeypatch, tmp_path, files, capsys, workers, start):
    """Byte for byte, also in workers of a process that has read from it itself."""
    folder, contents = files
    packed = tmp_path / "packed"
    run_main(monkeypatch, folder, packed)
    assert f"{len(contents)} files, 3.0 MB: {packed}\n" in capsys.readouterr().out
    dataset = PackedFiles(packed)
    names = [dataset[index][0] for index in range(len(dataset))]
    assert names == [os.path.relpath(path, folder) for path in pack_files.files_below(folder)]
    loader = DataLoader(
        pickle.loads(pickle.dumps(dataset)),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=start,
    )
    read = list(loader)
    assert len(read) == len(contents) and dict(read) == contents


def test_interrupted(monkeypatch, tmp_path, files):
    """A packing that is killed leaves nothing under the file's name, and the next one succeeds."""
    folder, contents = files
    packed, pipe = tmp_path / "packed", folder / "d"
    os.mkfifo(pipe)  # whoever packs it waits here
    command = [sys.executable, ROOT / "recipes" / "pack_files.py", folder, packed]
    process = subprocess.Popen(command)
    with open(pipe, "wb"):  # returns when the other side has opened it
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not packed.exists() and (tmp_path / "packed.tmp").exists()
    pipe.unlink()
    run_main(monkeypatch, folder, packed)
    assert len(PackedFiles(packed)) == len(contents)
    assert not (tmp_path / "packed.tmp").exists()


@pytest.mark.parametrize(
    ("folder", "packed", "message"),
    [
        ("missing", "packed", "no files in missing"),
        ("nothing", "packed", "no files in nothing"),
        ("files", "exists", "exists exists: name another file, or delete it"),
        ("files", "files/packed", "files/packed is in files: write it elsewhere"),
        ("files", "missing/packed", "cannot pack files: "),
        ("broken", "packed", "cannot pack broken: "),
    ],
)
def test_bad_input(monkeypatch, tmp_path, capsys, folder, packed, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing" / "here").mkdir(parents=True)
    (tmp_path / "exists").touch()
    for name in ("files", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1").touch()
    (tmp_path / "broken" / "2").symlink_to("nowhere")
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, folder, packed)
    assert message in f"{exit.value} {capsys.readouterr().err}"
    assert not (tmp_path / "packed").exists()


def test_unreadable_folder_is_not_left_out(monkeypatch, tmp_path, files):
    def forbidden(path):
        raise PermissionError(f"may not read {path}")

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.raises(PermissionError):
        list(pack_files.files_below(files[0]))


@pytest.mark.parametrize("length", [0, 10, -1, None])
def test_broken_packed_file(monkeypatch, tmp_path, files, length):
    packed = tmp_path / "packed"
    if length is not None:
        run_main(monkeypatch, files[0], packed)
        os.truncate(packed, length % packed.stat().st_size)
    with pytest.raises(SystemExit, match=f"cannot read {packed}: pack it again, or copy it again"):
        PackedFiles(packed)


def test_trains_as_before(tmp_path, shell):
    """Two ranks read each sample once, and get the weights of multinode.py."""
    pack_samples(tmp_path)
    (tmp_path / "plain.py").write_text(patched("multinode.py", FEWER_SAMPLES))
    (tmp_path / "packed.py").write_text(patched("multinode.py", PACKED_SAMPLES))
    variables = {"PACKED": "data.packed", "READ": "read", "PYTHONPATH": str(ROOT)}
    command = f"{tmp_path}/packed.py 1 1 --snapshot_path packed.pt"
    jobs = [
        shell.ranks(f"{tmp_path}/plain.py 1 1 --snapshot_path plain.pt", 2),
        shell.ranks(command, 2, **variables),
    ]
    for job in jobs:
        job.succeeds()
    assert_each_sample_once(tmp_path / "read")
    weights, expected = (load(tmp_path / name)["model"] for name in ("packed.pt", "plain.pt"))
    assert max_abs_diff(weights.values(), expected.values()) == 0


@pytest.mark.long
@needs_slurm
def test_job_copies_to_each_node(cluster, shell):
    """With the page's lines, torchrun's ranks read their node's own copy, which is then gone."""
    pack_samples(shell.folder)
    (shell.folder / "packed.py").write_text(patched("multinode.py", PACKED_SAMPLES))
    job_file = (ROOT / "slurm" / "multinode.sbatch").read_text()
    lines = job_file.replace("srun --label", JOB_LINES + "srun --label")
    assert lines != job_file
    (shell.folder / "cp.sbatch").write_text(lines)
    with_sbcast = re.search(r"`(sbcast .*?)`", PAGE)[1]
    lines = re.sub("^srun .* cp .*", with_sbcast, lines, flags=re.M)
    (shell.folder / "sbcast.sbatch").write_text(lines)
    submit = "sbatch --gpus-per-node=1"
    training = "packed.py 1 1 --num_workers 2 --snapshot_path"
    job = cluster(
        f"""
        export SLURM_TMPDIR=/dev/shm PYTHONPATH={ROOT}  # each node of this cluster has its own
        READ=read_cp {submit} cp.sbatch {training} cp.pt
        READ=read_sbcast {submit} sbcast.sbatch {training} sbcast.pt
        until left=$(squeue -h) && [ -z "$left" ]; do sleep 0.5; done
        srun -N2 bash -c 'echo left: /dev/shm/*'
        """,
        "-n 2",
    )
    assert job.wait() == 0, job.output
    assert job.output.count("left: /dev/shm/*\n") == 2, job.output
    for name in ("read_cp", "read_sbcast"):
        assert_each_sample_once(shell.folder / name)


@pytest.mark.parametrize("workers", [0, 2])
def test_tar_shards(monkeypatch, tmp_path, workers):
    """Three ranks, of which some have no shard, read each sample once."""
    names = [f"{number:02}" for number in range(20)]
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            tar.add(tmp_path / "..", "folder", recursive=False)
            for name in names[shard::4]:
                info = tarfile.TarInfo(name)
                info.size = 2
                tar.addfile(info, io.BytesIO(name.encode()))
    used = {
        "IterableDataset": IterableDataset,
        "get_worker_info": get_worker_info,
        "dist": dist,
        "tarfile": tarfile,
    }
    exec(SHARDS, used)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    read = []
    for rank in range(3):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        dataset = used["TarShards"](tmp_path.glob("*.tar"))
        read += DataLoader(dataset, batch_size=None, num_workers=workers)
    assert sorted(map(tuple, read)) == [(name, name.encode()) for name in names]


def test_waiting_is_measured(capsys):
    """By a clock that the loader moves by three seconds, and the step by one."""
    clock = SimpleNamespace(now=100.0)

    def train_step(inputs, targets):
        clock.now += 1

    def batches():
        for _ in range(10):
            clock.now += 3
            yield None, None

    fake_time = SimpleNamespace(perf_counter=lambda: clock.now)
    exec(WAITS, {"time": fake_time, "train_loader": batches(), "train_step": train_step})
    assert capsys.readouterr().out == "waited for data: 75% of the time\n"


def test_benchmark(tmp_path):
    """It measures all four ways, and leaves nothing behind."""
    script = ROOT / "bench" / "small_files.py"
    options = ["--files", "1500", "--bytes", "50", "--rounds", "1", "--folder", tmp_path]
    start = time.monotonic()
    result = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    longest = time.monotonic() - start
    assert result.returncode == 0 and not result.stderr, result.stderr
    assert "1,500 files of 50 bytes" in result.stdout
    rows = re.findall(r"^(?:reading|copying) the .*files? +(\S+)", result.stdout, re.M)
    assert len(rows) == 4 and all(0 <= float(seconds) < longest for seconds in rows)
    assert not list(tmp_path.iterdir())
