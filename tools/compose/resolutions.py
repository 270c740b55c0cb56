"""Recorded resolutions of conflicts, as git's rerere keeps them.

resolutions.txt has both sides of a conflict, as git marks them, and below them the lines that a
person has written for their place. If these serve several conflicts, they stand below the last one.
An entry without a second side is no conflict: where its files meet, its lines are replaced. One
without any lines is an order of files: where they conflict, the lines of the last one stay.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from tools.compose.merge import texts
from tools.steps import ROOT

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


def orders():
    """Returns each order, and the entries without a second side about conflicts in it."""
    of_one = [known for known in read() if known.theirs is None]
    return {
        order.parts: [k for k in of_one if k.ours and {*k.parts} <= {*order.parts}]
        for order in of_one
        if not order.ours
    }


def owners(order, entries, old, side):
    """Returns which files of an order have a side's new lines, or none if one is from elsewhere."""
    found = set()
    for text in (text for text in texts(side) if text not in texts(old)):
        files = {file for file in order if text in (ROOT / file).read_text().splitlines()}
        if not files:
            files = next(({*known.parts} for known in entries if text in known.lines), set())
        if not files:
            return set()
        found |= files
    return found


def put_in_order(old, ours, theirs):
    """Returns the lines of the side whose files come last in an order, or None if there is none."""
    for order, entries in orders().items():
        files = [owners(order, entries, old, side) for side in (ours, theirs)]
        first, second = (max(map(order.index, names), default=-1) for names in files)
        if -1 < min(first, second) < max(first, second):
            together = [known for known in entries if {*known.parts} <= files[0] | files[1]]
            return put_in(together, ours if first > second else theirs)
    return None


def find(part, old, ours, theirs):
    """Returns the lines that were written for this conflict, or None."""
    sides = [texts(ours), texts(theirs)]
    for known in read():
        if [known.ours, known.theirs] in (sides, sides[::-1]):
            return with_sources(known.lines, part, ours, theirs)
    return put_in_order(old, ours, theirs)


def places(lines, wanted):
    """Returns where these texts begin among the lines."""
    all_texts = texts(lines)
    return [i for i in range(len(lines)) if all_texts[i : i + len(wanted)] == wanted]


def put_in(entries, lines):
    """Returns the lines with what these replace; where that is done already, it stays."""
    for known in entries:
        stays = known.lines[: len(known.ours)] == known.ours
        done = places(lines, known.lines) if stays else []
        for start in [start for start in places(lines, known.ours) if start not in done][:1]:
            end = start + len(known.ours)
            new = with_sources(known.lines, known.parts[-1], lines[start:end])
            lines = [*lines[:start], *new, *lines[end:]]
    return lines


def replacements(files):
    """Returns the entries to be put in where these files meet, in conflict or not."""
    in_conflicts = [known for entries in orders().values() for known in entries]
    found = [known for known in read() if known.theirs is None and {*known.parts} <= {*files}]
    return [known for known in found if known.ours and known not in in_conflicts]


def replace(files, lines):
    """Returns the lines with what is to be replaced where these files meet."""
    return put_in(replacements(files), lines)
