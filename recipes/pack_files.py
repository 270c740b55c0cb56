"""Pack the files of a folder into one file, once, before the training; PackedFiles reads it.

    python recipes/pack_files.py FOLDER PACKED

The packed file holds the name and the content of each file, then the index: a row per file with
three numbers, which are where its name begins, where its content begins, and where that ends.
"""

import argparse
import functools
import os
import struct
import sys
from array import array
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

FOOTER = struct.Struct("<8sq")  # the last bytes of a packed file: MAGIC and the number of its rows
MAGIC = b"packed01"
ROW_BYTES = 3 * 8


class PackedFiles(Dataset):
    """The files of a packed file: of each, its name in the folder and its content, as bytes."""

    def __init__(self, path):
        self.path = path
        self.offsets = read_index(path)

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, index):
        name_start, content_start, end = self.offsets[index].tolist()
        record = os.pread(open_once(self.path), end - name_start, name_start)
        if len(record) < end - name_start:
            raise OSError(f"{self.path}: only a part of file {index} was read")
        name_length = content_start - name_start
        return os.fsdecode(record[:name_length]), record[name_length:]


@functools.cache  # opened on the first read, and so by each worker that is spawned for itself
def open_once(path):
    return os.open(path, os.O_RDONLY)


def read_index(path):
    """Returns the index as a tensor of shape (files, 3); exits if it is not all there."""
    try:
        with open(path, "rb") as file:
            file.seek(-FOOTER.size, os.SEEK_END)
            magic, rows = FOOTER.unpack(file.read())
            if magic != MAGIC:
                raise ValueError("its end is not that of a packed file")
            file.seek(-FOOTER.size - rows * ROW_BYTES, os.SEEK_END)
            index = bytearray(file.read(rows * ROW_BYTES))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read {path}: pack it again, or copy it again: {error}")
    return torch.frombuffer(index, dtype=torch.int64).view(rows, 3)


def files_below(folder):
    """Yields the paths of all files below a folder, in an order that is always the same."""
    for parent, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        folders.sort()
        for name in sorted(names):
            yield os.path.join(parent, name)


def stop(error):
    raise error  # os.walk would leave out a folder that it cannot read


def pack(folder, packed):
    """Writes the files below `folder` into the file `packed`; returns how many there are."""
    index = array("q")  # signed, eight bytes
    tmp_path = f"{packed}.tmp"
    with open(tmp_path, "wb") as file:
        for path in tqdm(files_below(folder), unit="file", disable=None):
            index.append(file.tell())
            file.write(os.fsencode(os.path.relpath(path, folder)))
            index.append(file.tell())
            file.write(Path(path).read_bytes())
            index.append(file.tell())
        rows = len(index) // 3
        file.write(index.tobytes())
        file.write(FOOTER.pack(MAGIC, rows))
        file.flush()
        os.fsync(file.fileno())
    os.replace(tmp_path, packed)  # atomic: `packed` is always complete
    return rows


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="whose files, and those of its folders, to pack")
    parser.add_argument("packed", type=Path, help="the file to write; must not exist")
    args = parser.parse_args()
    if not any(names for _, _, names in os.walk(args.folder, followlinks=True)):
        parser.error(f"no files in {args.folder}")
    if args.packed.exists():
        parser.error(f"{args.packed} exists: name another file, or delete it")
    if args.folder.resolve() in args.packed.resolve().parents:
        parser.error(f"{args.packed} is in {args.folder}: write it elsewhere")
    return args


def main(args):
    try:
        rows = pack(args.folder, args.packed)
    except OSError as error:
        sys.exit(f"cannot pack {args.folder}: {error} ({args.packed}.tmp can be deleted)")
    print(f"{rows:,} files, {args.packed.stat().st_size / 1e6:,.1f} MB: {args.packed}")


if __name__ == "__main__":
    main(parse_args())
