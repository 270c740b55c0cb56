"""Recorded resolutions of conflicts, as git's rerere keeps them.

An entry of resolutions.diff names the files that meet, in the order of their merge, and has hunks
in the format of tools/edits, separated by @@. If both sides of a conflict are in a hunk, one stands
below the other, separated by =======: the lines with - are of their side alone, those with a blank
stay, those with + are what a person has written. A hunk is taken wherever the same two sides meet.
If each new line of a side is in a hunk, hunks are also taken one by one, in the lines of the other
side. A hunk that is no conflict replaces its lines wherever all of its files meet.
"""

import functools
import itertools
import re
from pathlib import Path
from typing import NamedTuple

from tools.compose.merge import texts
from tools.edits import side

PATH = Path(__file__).with_name("resolutions.diff")


class Resolution(NamedTuple):
    parts: tuple[str, ...]  # a choice of files in which it is met, in the order of their merge
    sides: list[list[str]]  # two of a conflict, else one, which is replaced
    lines: list[str]


@functools.cache
def read():
    """Returns the resolutions, in the order of the file."""
    return parse(PATH.read_text())


def parse(text):
    """Returns the resolutions in a text of this format."""
    result = []
    for entry in re.split(r"^where: ", text, flags=re.MULTILINE)[1:]:
        files, diff = entry.strip("\n").split("\n", 1)
        for hunk in diff.split("\n@@\n"):
            sides = [half.split("\n") for half in hunk.split("\n=======\n")]
            old = [side(half, " -").splitlines() for half in sides]
            new = [line for half in sides for line in side(half, " +").splitlines()]
            result.append(Resolution(tuple(files.split(" + ")), old, new))
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
        for ours, theirs in itertools.permutations(known.sides, 2):
            if places(side, ours) and places(result, theirs):
                result = put_in(known, theirs, result, side)
                left -= {*ours}
    return None if left else result


def find(part, old, ours, theirs):
    """Returns the lines that were written for this conflict, or for its parts, or None."""
    sides = [texts(ours), texts(theirs)]
    for known in read():
        if known.sides in (sides, sides[::-1]):
            return with_sources(known.lines, part, ours, theirs)
    found = (put_together(old, *both) for both in ((ours, theirs), (theirs, ours)))
    return next((lines for lines in found if lines is not None), None)


def places(lines, wanted):
    """Returns where these texts begin among the lines."""
    all_texts = texts(lines)
    return [i for i in range(len(lines)) if all_texts[i : i + len(wanted)] == wanted]


def replacements(files):
    """Returns the entries that are no conflict and whose files are all among these."""
    return [known for known in read() if len(known.sides) == 1 and {*known.parts} <= {*files}]


def replace(files, lines):
    """Returns the lines with what is to be replaced where these files meet."""
    for known in replacements(files):
        lines = put_in(known, *known.sides, lines)
    return lines
