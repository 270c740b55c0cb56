"""Edits of files, and what must notice each: the diffs beside this file, in one format.

An edit has three lines, `what:`, `where:` and `expected:`, and below them the diff of a file, whose
hunks are separated by @@. In each of the files that it names, a hunk's old lines must stand once.
What is expected depends on the list:

    faults.diff     the checks of `make check` that fail, and no others
    messages.diff   a check that fails, and what it says
    accepted.diff   the checks that pass all the same
    upgrades.diff   a file that is composed with the edited one, and what compose says of that
    noticed.diff    the tests that fail

`python -m tools.edits 3 > broken.py` writes the third fault; docs/faults.md asks about ten of them.
"""

import functools
from pathlib import Path
from typing import NamedTuple

from tools.steps import ALL, PORTS, ROOT

FOLDER = Path(__file__).parent
HEADER = ("what", "where", "expected")
STEPS = {name for step in ALL + PORTS for name in step[:2]}


class Edit(NamedTuple):
    what: str
    where: str  # the names of files, or patterns, which stand for files that are steps
    expected: str
    hunks: tuple[tuple[str, ...], ...]  # lines, each with its sign

    @property
    def stage(self):
        """Returns the name by which `make check` knows the file."""
        return self.where.removesuffix(".py")

    def files(self, folder=ROOT):
        """Yields the paths of its files in a copy of this repository."""
        for pattern in self.where.split():
            for path in sorted(folder.glob(pattern)):
                if "*" not in pattern or str(path.relative_to(folder)) in STEPS:
                    yield path

    def apply(self, path):
        """Returns the text of a file with this edit."""
        text = path.read_text()
        for hunk in self.hunks:
            old, new = side(hunk, " -"), side(hunk, " +")
            if f"\n{text}".count(f"\n{old}") != 1:
                first = old.strip().partition("\n")[0]
                raise ValueError(f"{self.what}: not once in {path.name}: {first}")
            text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
        return text

    def source(self):
        """Returns the text of its only file with this edit."""
        (path,) = self.files()
        return self.apply(path)

    def problem(self):
        """Returns why it is no edit of its files, or None."""
        try:
            if not [self.apply(path) for path in self.files()]:
                return f"{self.what}: there is no {self.where}"
        except ValueError as error:
            return str(error)


def side(hunk, signs):
    return "".join(f"{line[1:]}\n" for line in hunk if line.startswith(tuple(signs)))


def parse(text):
    """Returns the edit of a text, as `read` finds them."""
    lines = text.strip("\n").split("\n")
    header = [
        line.removeprefix(f"{name}:").strip() for name, line in zip(HEADER, lines, strict=False)
    ]
    diff = "\n".join(line or " " for line in lines[len(HEADER) :])
    return Edit(*header, tuple(tuple(hunk.split("\n")) for hunk in diff.split("\n@@\n")))


@functools.cache
def read(name):
    """Returns the edits of one of the lists."""
    texts = (FOLDER / f"{name}.diff").read_text().split(f"\n\n{HEADER[0]}:")
    return [parse(text) for text in texts]
