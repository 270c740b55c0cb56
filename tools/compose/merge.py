"""Merges files that build on one another, line by line. docs/assets/compose.js does the same.

A line is a pair: its text, and the file that it comes from, or None if several have it.
"""

import re


def diff(old, new):
    """Yields a sign and an index: + for a line of `new`, - or a blank for one of `old`.

    As in docs/assets/lcs.js, those with a blank are a longest common subsequence.
    """
    common = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]  # lines, from i and from j on
    for i in reversed(range(len(old))):
        for j in reversed(range(len(new))):
            if old[i][0] == new[j][0]:
                common[i][j] = common[i + 1][j + 1] + 1
            else:
                common[i][j] = max(common[i + 1][j], common[i][j + 1])
    i, j = 0, 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i][0] == new[j][0]:
            yield " ", i
            i, j = i + 1, j + 1
        elif j == len(new) or (i < len(old) and common[i + 1][j] >= common[i][j + 1]):
            yield "-", i
            i += 1
        else:
            yield "+", j
            j += 1


def edits(old, new):
    """Returns what `new` adds before each line of `old`, and what it has in the place of some."""
    added, replaced = {}, {}
    removed, inserted = [], []
    for sign, k in [*diff(old, new), (" ", len(old))]:
        if sign == "-":
            removed.append(k)
        elif sign == "+":
            inserted.append(new[k])
        else:
            one_by_one = len(removed) == len(inserted)
            for n, i in enumerate(removed):
                replaced[i] = [inserted[n]] if one_by_one else []
            if not removed:
                added[k] = inserted
            elif not one_by_one:
                replaced[removed[0]] = inserted
            removed, inserted = [], []
    return added, replaced


def texts(lines):
    return [text for text, _ in lines]


def join(lines, others):
    """Returns both, one after the other; if all are imports, sorted, those of a module as one."""
    if not lines or not others or texts(lines) == texts(others):
        return lines or others
    imports = {}
    for text, part in lines + others:
        found = re.fullmatch(r"(import|from) (\S+)(?: import (\w.*))?", text)
        if not found:
            return lines + others
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


def merge(old, ours, theirs, resolve):
    """Returns `old` with the edits of both; where they conflict, what `resolve(ours, theirs)` says.

    A conflict is another text of both in the place of the same lines.
    """
    our_added, our_replaced = edits(old, ours)
    their_added, their_replaced = edits(old, theirs)
    result, conflict = [], ([], [])
    for i in range(len(old) + 1):
        added = join(our_added.get(i, []), their_added.get(i, []))
        a, b = our_replaced.get(i), their_replaced.get(i)
        differ = a is not None and b is not None and texts(a) != texts(b)
        joined = join(a, b) if differ and len(a) == len(b) == 1 else []
        if any(conflict) and (added or not differ):
            result += resolve(*conflict)
            conflict = ([], [])
        result += added
        if len(joined) == 1:  # names of one module
            result += joined
        elif differ:
            conflict[0].extend(a)
            conflict[1].extend(b)
        elif i < len(old):
            result += next((lines for lines in (a, b) if lines is not None), [old[i]])
    return result
