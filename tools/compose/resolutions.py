"""Recorded resolutions of conflicts, as git's rerere keeps them.

resolutions.txt has both sides of a conflict, as git marks them, and below them the lines that a
person has written for their place. If these serve several conflicts, they stand below the last one.
An entry is also taken for a part of both sides. One without a second side is no conflict: where its
files meet, its lines are replaced.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from tools.compose.merge import texts

PATH = Path(__file__).with_name("resolutions.txt")
ENTRY = re.compile(
    r"^<<<<<<< (.+)\n((?:.*\n)*?)(?:=======\n((?:.*\n)*?))?>>>>>>>(.*)\n((?:(?!<<<<<<< ).*\n)*)",
    re.MULTILINE,
)


class Resolution(NamedTuple):
    parts: tuple[str, ...]  # a choice of files in which it is met, in the order of their merge
    ours: list[str]
    theirs: list[str] | None  # None if `ours` is replaced
    lines: list[str]


@functools.cache
def read():
    """Returns the resolutions, in the order of the file."""
    return parse(PATH.read_text())


def parse(text):
    """Returns the resolutions in a text. A blank line ends each."""
    result, same = [], []
    for first, ours, theirs, second, lines in ENTRY.findall(text.rstrip() + "\n\n"):
        parts = f"{first} + {second.strip()}".removesuffix(" + ").split(" + ")
        same.append((tuple(parts), ours.splitlines(), theirs.splitlines() if second else None))
        if lines:
            result += [Resolution(*entry, lines.splitlines()[:-1]) for entry in same]
            same = []
    return result


def with_sources(lines, part, *sides):
    """Returns lines, each with the file from which a side has it, by default `part`."""
    sources = {text: source for side in sides for text, source in side}
    return [(text, sources.get(text) or part) for text in lines]


def put_in(known, replaced, lines, *sides):
    """Returns the lines with what an entry has for the first place of those to be replaced."""
    for start in places(lines, replaced)[:1]:
        end = start + len(replaced)
        new = with_sources(known.lines, known.parts[-1], lines[start:end], *sides)
        lines = [*lines[:start], *new, *lines[end:]]
    return lines


def put_together(old, side, other):
    """Returns `other` with what entries make of each new line of `side`, or None if one is left."""
    result, left = other, {text for text in texts(side) if text not in texts(old)}
    if not left:
        return None
    for known in read():
        for ours, theirs in ((known.ours, known.theirs), (known.theirs, known.ours)):
            if ours and theirs and places(side, ours) and places(result, theirs):
                result = put_in(known, theirs, result, side)
                left -= {*ours}
    return None if left else result


def find(part, old, ours, theirs):
    """Returns the lines that were written for this conflict, or for its parts, or None."""
    sides = [texts(ours), texts(theirs)]
    for known in read():
        if [known.ours, known.theirs] in (sides, sides[::-1]):
            return with_sources(known.lines, part, ours, theirs)
    found = (put_together(old, *both) for both in ((ours, theirs), (theirs, ours)))
    return next((lines for lines in found if lines is not None), None)


def places(lines, wanted):
    """Returns where these texts begin among the lines."""
    all_texts = texts(lines)
    return [i for i in range(len(lines)) if all_texts[i : i + len(wanted)] == wanted]


def replacements(files):
    """Returns the entries without a second side whose files are all among these."""
    return [known for known in read() if known.theirs is None and {*known.parts} <= {*files}]


def replace(files, lines):
    """Returns the lines with what is to be replaced where these files meet."""
    for known in replacements(files):
        lines = put_in(known, known.ours, lines)
    return lines
