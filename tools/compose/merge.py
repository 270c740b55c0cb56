"""Merges files that build on one another, line by line.

A line is a pair: its text, and the file that it comes from, or None if several have it.
"""

import functools
import math
import re


def diff(old, new):
    """Returns signs and indices: + for a line of `new`, - or a blank for one of `old`.

    Those with a blank are a longest common subsequence.
    """
    return diff_texts(tuple(texts(old)), tuple(texts(new)))


@functools.cache
def diff_texts(old, new):
    common = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]  # lines, from i and from j on
    for text, row, below in zip(old[::-1], common[-2::-1], common[:0:-1], strict=True):
        for j in reversed(range(len(new))):
            if text == new[j]:
                row[j] = below[j + 1] + 1
            else:  # their maximum, without a call in this innermost loop
                row[j] = below[j] if below[j] > row[j + 1] else row[j + 1]
    i, j = 0, 0
    signs = []
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            signs.append((" ", i))
            i, j = i + 1, j + 1
        elif j == len(new) or (i < len(old) and common[i + 1][j] >= common[i][j + 1]):
            signs.append(("-", i))
            i += 1
        else:
            signs.append(("+", j))
            j += 1
    return signs


def subject(line):
    """Returns the start of a line, which tells what it assigns to or calls."""
    return re.match(r"\s*[\w.]*", line[0])[0]


def hunks(old, new):
    """Yields where `new` differs: the start and the end in `old`, and the lines in their place."""
    removed, inserted = 0, []
    for sign, k in [*diff(old, new), (" ", len(old))]:
        removed += sign == "-"
        if sign == "+":
            inserted.append(new[k])
        if sign == " ":
            yield k - removed, k, inserted
            removed, inserted = 0, []


def edits(old, new):
    """Returns what `new` adds before lines of `old`, and what it has in the place of others.

    These are known by their first line: where they end, and the lines in their place. Lines that
    `new` has as many for count one by one, if each assigns to or calls the same as before.
    """
    added, replaced = {}, {}
    for start, end, lines in hunks(old, new):
        if start == end:
            added[start] = lines
        elif [*map(subject, old[start:end])] == [*map(subject, lines)]:
            replaced |= {i: (i + 1, [line]) for i, line in enumerate(lines, start)}
        else:
            replaced[start] = (end, lines)
    return added, replaced


def version(old, start, end, added, replaced):
    """Returns what the edits have in the place of the lines from `start` to `end`."""
    result = []
    i = start
    while i < end:
        if i > start:
            result += added.get(i, [])
        i, lines = replaced.get(i, (i + 1, old[i : i + 1]))
        result += lines
    return result


def texts(lines):
    return [text for text, _ in lines]


def join_imports(lines):
    """Returns them sorted, those of a module as one, or [] if a line is no import."""
    imports = {}
    for text, part in lines:
        found = re.fullmatch(r"(import|from) (\S+)(?: import (\w.*))?", text)
        if not found:
            return []
        keyword, module, names = found.groups()
        known, _ = imports.get((keyword == "from", module), (set(), None))
        imports[keyword == "from", module] = known | {*(names or "").split(", ")}, part
    return [
        (
            f"from {module} import {', '.join(sorted(names))}" if is_from else f"import {module}",
            part,
        )
        for (is_from, module), (names, part) in sorted(imports.items())
    ]


def indents(lines):
    return [len(text) - len(text.lstrip()) for text in texts(lines) if text.strip()] or [0]


def settle(old, ours, theirs):
    """Returns what comes in the place of `old`, which may be no line, or None for a conflict."""
    if texts(theirs) in (texts(old), texts(ours)):
        return ours
    if texts(ours) == texts(old):
        return theirs
    imports = join_imports(ours + theirs)
    if imports and (not old or len(ours) == len(theirs) == len(imports) == 1):
        return imports
    if not old:
        for first, second in ((ours, theirs), (theirs, ours)):
            if min(indents(first)) >= indents(second)[0]:  # else it would be in a block of `first`
                return first + second
    return None


def merge(old, ours, theirs, resolve):
    """Returns `old` with the edits of both; where they conflict, what `resolve` says of the three.

    A conflict is another text of both in the place of the same lines. Among them is what one side
    adds between lines that the other replaces as a whole, or at the end of a block that the other
    dissolves: where it belongs now, nobody can tell.
    """
    our_added, our_replaced = edits(old, ours)
    their_added, their_replaced = edits(old, theirs)
    result, conflict = [], ([], [], [])
    start, depth = 0, math.inf  # at most, of what is added next
    while start <= len(old):
        i, end = start, start + 1
        while i < end:  # an edit of one side may begin within one of the other
            end = max([end, *(r[i][0] for r in (our_replaced, their_replaced) if i in r)])
            i += 1
        pieces = [
            ([], our_added.get(start, []), their_added.get(start, [])),
            (
                old[start:end],
                version(old, start, end, our_added, our_replaced),
                version(old, start, end, their_added, their_replaced),
            ),
        ]
        for before, a, b in pieces:
            lines = settle(before, a, b)
            if lines and not before and indents(lines)[0] > depth:
                lines = None
            if lines is None:
                for side, more in zip(conflict, (before, a, b), strict=True):
                    side.extend(more)
            elif lines:
                result += [*(resolve(*conflict) if any(conflict) else []), *lines]
                conflict = ([], [], [])
        moved = lines and indents(old[start:end])[-1] != indents(lines)[-1]
        depth = indents(lines)[-1] if moved else math.inf
        start = end
    return result + (resolve(*conflict) if any(conflict) else [])
