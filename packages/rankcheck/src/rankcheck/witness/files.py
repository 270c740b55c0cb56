"""Notes which files a process writes, renames and brings to the disk."""

import builtins
import io
import os

from torch.distributed import checkpoint

from rankcheck.witness import caller, note_save, observe, place, write

synced = set()  # the inodes of files that are on the disk


def note_checkpoint(storage, event):
    """Notes what torch.distributed.checkpoint saves and loads: folders."""

    def note(state_dict=None, **options):
        if not caller():
            return
        if event == "load":
            write(loaded_to="a folder", place=place())
        else:
            path = options.get("checkpoint_id") or getattr(options.get(storage), "path", "")
            note_save(path, folder=True)

    return note


def note_fsync(result, fd):
    synced.add(os.fstat(fd if isinstance(fd, int) else fd.fileno()).st_ino)


def note_rename(src, dst, **options):
    if caller():
        path, target = os.path.abspath(src), os.path.abspath(dst)
        on_disk = os.path.exists(path) and os.stat(path).st_ino in synced
        write(renamed=path, to=target, synced=on_disk, place=place())


def note_open(file, mode="r", *args, **options):
    """Notes that a file is made anew, or emptied."""
    if "w" in mode and isinstance(file, str | os.PathLike) and (line := caller()):
        path = os.path.abspath(file)
        if not path.startswith("/dev/"):
            write(opened=path, place=line)


def install():
    observe("saves", os, "fsync", after=note_fsync)
    for module in (builtins, io):  # pathlib opens by the latter
        observe("saves", module, "open", before=note_open)
    for name in ("rename", "replace"):
        observe("saves", os, name, before=note_rename)
    for name in ("save", "async_save", "load"):
        storage = "storage_reader" if name == "load" else "storage_writer"
        observe("saves", checkpoint, name, before=note_checkpoint(storage, name))
