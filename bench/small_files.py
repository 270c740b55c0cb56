"""Reads many small files in random order, and then one file in which they are packed.

    python bench/small_files.py --folder DISK

measures the disk on which the folder is; without --folder, the one for temporary files. In each
round, every way starts without the contents in memory, where the system allows to drop them. What
it knows of the files' names and places stays in memory, which favors the small files.
"""

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "recipes"))
from pack_files import PackedFiles, files_below, pack  # noqa: E402

FILES_PER_FOLDER = 1000


def write_files(folder, count, size):
    for number in range(count):
        parent = folder / f"{number // FILES_PER_FOLDER:06}"
        parent.mkdir(parents=True, exist_ok=True)
        (parent / f"{number:09}").write_bytes(os.urandom(size))


def drop(paths):
    """Drops the contents of files from memory, where the system lets an ordinary user do so."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_disk():
    """Returns how many bytes this process has had fetched from the disk, if the system counts."""
    with contextlib.suppress(OSError), open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    return 0


class Disk:
    """The small files and their packed file on a disk, and the ways to read all of them."""

    def __init__(self, folder, count, size):
        self.folder = folder / "files"
        self.packed = folder / "packed"
        self.copy = folder / "copy"
        write_files(self.folder, count, size)
        self.paths = list(files_below(self.folder))
        os.sync()  # what is not yet on the disk cannot be dropped from memory
        drop(self.paths)
        start = time.perf_counter()
        pack(self.folder, self.packed)
        self.packing_seconds = time.perf_counter() - start  # it ends with an fsync
        self.order = list(range(count))
        random.Random(0).shuffle(self.order)

    def read_files(self):
        for index in self.order:
            Path(self.paths[index]).read_bytes()

    def read_packed(self):
        dataset = PackedFiles(self.packed)
        for index in self.order:
            dataset[index]

    def copy_files(self):
        shutil.copytree(self.folder, self.copy)

    def copy_packed(self):
        shutil.copyfile(self.packed, self.copy)

    def measure(self, way):
        """Returns the seconds that it takes, and how many bytes came from the disk."""
        drop([*self.paths, self.packed])
        before = bytes_from_disk()
        start = time.perf_counter()
        way()
        seconds = time.perf_counter() - start
        if self.copy.is_dir():
            shutil.rmtree(self.copy)
        self.copy.unlink(missing_ok=True)
        return seconds, bytes_from_disk() - before


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="on the disk")
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--bytes", type=int, default=10_000, help="per file")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if min(args.files, args.bytes, args.rounds) < 1:
        parser.error("--files, --bytes and --rounds must be 1 or more")
    if not os.access(args.folder, os.W_OK):
        parser.error(f"cannot write into {args.folder}")
    return args


def main(args):
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="small_files-") as folder:
        disk = Disk(Path(folder), args.files, args.bytes)
        ways = {
            "reading the small files": disk.read_files,
            "reading the packed file": disk.read_packed,
            "copying the small files": disk.copy_files,
            "copying the packed file": disk.copy_packed,
        }
        measured = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                measured[name].append(disk.measure(way))
    print(f"{args.files:,} files of {args.bytes:,} bytes, packed in {disk.packing_seconds:.1f} s")
    print(f"{'median of ' + str(args.rounds):<25}{'seconds':>9}{'files/s':>12}{'MB from disk':>14}")
    medians = []
    for name, rounds in measured.items():
        seconds, read = map(statistics.median, zip(*rounds, strict=True))
        medians.append(seconds)
        print(f"{name:<25}{seconds:>9.2f}{args.files / seconds:>12,.0f}{read / 1e6:>14,.0f}")
    print(f"the small files take {medians[0] / medians[1]:.1f} times as long to read,")
    print(f"and {medians[2] / medians[3]:.1f} times as long to copy")


if __name__ == "__main__":
    main(parse_args())
