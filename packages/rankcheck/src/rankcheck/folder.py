"""The folder that a run starts in: links to what lies where one stands, and none of its snapshots.

What the script reads is found there; before it writes to a link, or below one, a copy takes the
link's place, so that nothing of the user's is changed.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from pathlib import Path

SNAPSHOTS = (".pt", ".pth", ".pth.tar", ".ckpt", ".safetensors", ".distcp")
MAX_LOOKED_AT = 2000  # files of a folder in which a snapshot is looked for
REFUSAL = "rankcheck does not let it write over"
ADVICE = "let it write to a relative path, or only read it (numpy.memmap needs mode='r')"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def has_snapshots(path):
    """Whether this is a snapshot, or a folder with one: the first run must not begin with it."""
    if path.is_file():
        return path.name.endswith(SNAPSHOTS)
    for number, file in enumerate(path.rglob("*")):
        if file.name.endswith(SNAPSHOTS) or number == MAX_LOOKED_AT:
            return file.name.endswith(SNAPSHOTS)
    return False


def visible(root):
    """Returns what a script in `root` is to find there, and what of it is left out."""
    found = [path for path in sorted(root.iterdir()) if not path.name.startswith((".", "__"))]
    found = [path for path in found if not (path / "pyvenv.cfg").exists()]
    left_out = [path for path in found if has_snapshots(path)]
    return [path for path in found if path not in left_out], left_out


def link(paths, root, home):
    """Links each of `paths` into `home`, under its path relative to `root`."""
    for path in paths:
        place = Path(os.path.normpath(home / os.path.relpath(path, root)))
        if not place.is_relative_to(home.parent):
            continue  # it is found by its own path
        place.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # a restart in the same folder
            place.symlink_to(path)


def replace_link(path, empty):
    """Puts a copy in the place of a link: of a folder, one with links to what is in it."""
    target, copy = path.resolve(), path.with_name(f".{path.name}.copy")
    if target.is_dir():
        copy.mkdir(exist_ok=True)
        link(target.iterdir(), target, copy)
        path.unlink()  # which a folder cannot replace
    elif empty:
        copy.touch()
    else:
        shutil.copy(target, copy)
    copy.rename(path)  # at once: another rank may be reading it


class Guard:
    """Sees what a process writes: into `home` it may, but through no link out of it.

    A file elsewhere that is older than `start` is not written over.
    """

    def __init__(self, home, lock, start):
        self.home = Path(home).resolve()
        self.lock = lock
        self.start = start
        self.busy = False

    def before_write(self, path, empty=False):
        path = Path(os.path.abspath(os.fsdecode(path)))
        if path.is_relative_to(self.home):
            # The witness sees open(), and would take the lock for a file of the script's.
            with os.fdopen(os.open(self.lock, os.O_WRONLY | os.O_CREAT), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may do the same
                self.replace_links(path, empty)
        elif path.is_file() and not path.is_relative_to("/dev") and self.is_old(path):
            raise PermissionError(f"{REFUSAL} {path}: {ADVICE}")

    def is_old(self, path):
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        return path.stat().st_mtime < self.start and not path.is_relative_to(cache)

    def replace_links(self, path, empty):
        place = self.home
        for part in path.relative_to(self.home).parts:
            place /= part
            if place.is_symlink():
                replace_link(place, empty and place == path)

    def see(self, event, arguments):
        """An audit hook of Python: see sys.addaudithook."""
        if self.busy:
            return
        self.busy = True
        try:
            self.see_event(event, arguments)
        finally:
            self.busy = False

    def see_event(self, event, arguments):
        if event == "open" and isinstance(arguments[0], str | bytes):
            path, mode, flags = arguments
            if set(mode or "") & set("wxa+") or (not mode and flags & WRITES):
                self.before_write(path, empty="w" in (mode or "") or bool(flags & os.O_TRUNC))
        elif event == "shutil.rmtree":  # which refuses a link
            self.before_write(arguments[0])
        elif event in ("os.mkdir", "os.remove", "os.rmdir"):
            self.before_write(os.path.dirname(os.path.abspath(arguments[0])))
        elif event == "os.rename":
            for path in arguments[:2]:
                self.before_write(os.path.dirname(os.path.abspath(path)))

    def install(self):
        sys.addaudithook(self.see)
