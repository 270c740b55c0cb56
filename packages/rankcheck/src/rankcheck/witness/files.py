"""Notes which files a process writes, renames and brings to the disk."""

import builtins
import io
import os
import pathlib
import shutil
import sys

import torch
from torch.distributed import checkpoint

from rankcheck.witness import (
    caller,
    get_rank,
    is_library,
    note_save,
    observe,
    place,
    state,
    write,
)

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


def note_event(kind, path):
    """Notes what rank 0 does to files of its folder after its first step.

    `kind` is mkdir, write, rename or delete: a folder is made, a file emptied, or about to be
    renamed, a file or folder deleted.
    """
    path = os.path.abspath(path)
    if get_rank() == 0 and state.steps and path.startswith(os.getcwd() + os.sep):
        event = f"{kind} {os.path.relpath(path)}"
        write(file_event=event, place=place())
        for function in state.on_file_event:
            function(event)


def note_look(path, *args, **options):
    """Notes that the script looks whether there is a folder, or a file."""
    if isinstance(path, str | os.PathLike) and (line := caller()):
        write(looks_for=os.path.abspath(path), meetings=state.meetings, place=line)


def note_making(path, *args, dir_fd=None, **options):
    """Notes that a folder is made, by a call that fails if another rank has just made it."""
    frame = sys._getframe(1)
    while frame and is_library(frame):
        allows = "exist_ok" in frame.f_locals and frame.f_locals["exist_ok"]
        if allows and frame.f_globals.get("__name__") in ("os", "pathlib"):
            return
        frame = frame.f_back
    if frame:
        write(makes=os.path.abspath(path), meetings=state.meetings, place=caller())


def note_download(name):
    def note(self, *args, **options):
        write(downloads=name, meetings=state.meetings, place=place())

    return note


def follow_downloads(module):
    """Notes who asks a data set of torchvision's to download its files."""
    for name, kind in vars(module).items():
        if isinstance(kind, type) and "download" in vars(kind):
            observe("data", kind, "download", before=note_download(name))


def note_after(kind):
    def note(result, path, *args, dir_fd=None, **options):
        if dir_fd is None:  # else rmtree deletes what is in a folder, which is noted as one
            note_event(kind, path)

    return note


def note_opened(result, file, mode="r", *args, **options):
    if "w" in mode and isinstance(file, str | os.PathLike):
        note_event("write", file)


def note_save_to_path(obj, f, *args, **options):
    if isinstance(f, str | os.PathLike):  # which torch opens in C++, afterwards
        note_event("write", f)


def install():
    observe("saves", os, "fsync", after=note_fsync)
    observe("saves", torch, "save", before=note_save_to_path)
    observe("saves", os, "mkdir", before=note_making, after=note_after("mkdir"))
    for owner, names in ((os.path, ("exists", "isdir")), (pathlib.Path, ("exists", "is_dir"))):
        for name in names:
            observe("saves", owner, name, before=note_look)
    for module, name in ((os, "remove"), (os, "unlink"), (shutil, "rmtree")):
        observe("saves", module, name, after=note_after("delete"))
    for module in (builtins, io):  # pathlib opens by the latter
        observe("saves", module, "open", before=note_open, after=note_opened)
    for name in ("rename", "replace"):
        observe("saves", os, name, before=note_rename)
        observe("saves", os, name, before=lambda src, dst, **o: note_event("rename", src))
    for name in ("save", "async_save", "load"):
        storage = "storage_reader" if name == "load" else "storage_writer"
        observe("saves", checkpoint, name, before=note_checkpoint(storage, name))
