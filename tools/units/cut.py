"""Cuts a step's diff into units: the fewest changed lines that can be put back together.

A piece is an added line, a removed one, or one that stands for another. ruff says which names are
undefined or unused when it is put back: the lines that tie these loose ends go with it. Pieces that
take the same others with them are one unit. Attributes show when the script runs: see answers.py.
"""

import ast
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from tools.steps import ROOT

ALIKE = 0.5  # from this ratio on, a removed line is an older form of an added one
LOOSE_ENDS = "F821,F823,F401,F811,F841,ARG001,ARG002"  # ruff's rules: undefined, unused


class Piece(NamedTuple):
    """Lines of two files, numbered from 0, of which the new ones stand for the old ones."""

    old: range
    new: range


def hunks(base, file):
    """Yields the lines of two files that differ, as `diff` finds them."""
    command = ["diff", "-U0", ROOT / base, ROOT / file]
    diff = subprocess.run(command, capture_output=True, text=True, timeout=60)
    for header in re.findall(r"^@@ -(\S+) \+(\S+) @@", diff.stdout, re.MULTILINE):
        sides = []
        for side in header:
            start, _, count = side.partition(",")
            count = int(count or 1)
            start = int(start) - (count > 0)  # without lines, it is the line before
            sides.append(range(start, start + count))
        yield Piece(*sides)


def match(old, new, old_lines, new_lines):
    """Yields the pieces of a hunk: its lines in pairs, in order, where they are alike."""
    ratios = [
        (difflib.SequenceMatcher(None, old_lines[i].strip(), new_lines[j].strip()).ratio(), i, j)
        for i in old
        for j in new
    ]
    ratio, i, j = max(ratios, default=(0, 0, 0))
    if ratio >= ALIKE:
        yield from match(range(old.start, i), range(new.start, j), old_lines, new_lines)
        yield Piece(range(i, i + 1), range(j, j + 1))
        yield from match(range(i + 1, old.stop), range(j + 1, new.stop), old_lines, new_lines)
    elif old:
        yield Piece(old, new)
    else:
        yield from (Piece(old, range(j, j + 1)) for j in new)


def is_code(line):
    return bool(line.strip()) and not line.lstrip().startswith(("#", "@"))


def pieces(base, file, old_lines, new_lines):
    """Returns the pieces of a diff: comments and decorators with the line below, blanks above."""
    found = []
    for old, new in hunks(base, file):
        last = new_lines[new.stop - 1]
        if not old and last.lstrip().startswith("@") and last == new_lines[new.start - 1]:
            # It ends with the next function's decorator: its own is the one above it.
            old, new = (range(side.start - 1, side.stop - 1) for side in (old, new))
        waiting = None
        for piece in match(old, new, old_lines, new_lines):
            if waiting:
                old = range((waiting.old or piece.old).start, piece.old.stop)
                piece = Piece(old, range(waiting.new.start, piece.new.stop))
            shown = [new_lines[line] for line in piece.new]
            waiting = None
            if not any(map(is_code, shown)) and piece.new.stop < new.stop:
                waiting = piece
            elif not piece.old and not any(map(str.strip, shown)) and found:
                found[-1] = Piece(found[-1].old, range(found[-1].new.start, piece.new.stop))
            else:
                found.append(piece)
    return found


def ruff(texts):
    """Returns what ruff says of the names in each text: a message, and its line."""
    with tempfile.TemporaryDirectory() as folder:
        for number, text in enumerate(texts):
            Path(folder, f"{number}.py").write_text(text)
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero"]
        command += ["--select", LOOSE_ENDS, "--output-format", "json", folder]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
    found = [[] for _ in texts]
    for said in json.loads(run.stdout):
        number = int(Path(said["filename"]).stem)
        found[number].append((said["message"], said["location"]["row"]))
    return found


class Text:
    """A file in which some pieces are put back; `origins` has each line's piece, if it has one."""

    def __init__(self, old_lines, new_lines, pieces, put_back):
        lines, self.origins, self.starts = [], [], {}
        position = 0
        for index, (old, new) in enumerate(pieces):
            before = new_lines[position : new.start]
            side = new_lines[new.start : new.stop]
            if index in put_back:
                side = old_lines[old.start : old.stop]
            self.starts[index] = len(lines) + len(before) + 1
            lines += [*before, *side]
            self.origins += [None] * len(before) + [index] * len(side)
            position = new.stop
        lines += new_lines[position:]
        self.origins += [None] * (len(lines) - len(self.origins))
        self.text = "\n".join(lines) + "\n"


class Cut:
    """The pieces of a step, and which go together."""

    def __init__(self, base, file):
        self.old_lines, self.new_lines = (
            (ROOT / name).read_text().splitlines() for name in (base, file)
        )
        self.pieces = pieces(base, file, self.old_lines, self.new_lines)
        tree = ast.parse("\n".join(self.new_lines))
        self.statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
        self.statements.sort(key=lambda node: node.end_lineno - node.lineno)
        self.inside = {node: self.pieces_in(node) for node in self.statements}
        self.docstrings = {
            piece: node
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if ast.get_docstring(node) is not None
            for piece in self.inside[node.body[0]]
        }

    def first_line(self, index):
        """Returns the number, from 1, of a piece's first line of code."""
        new = self.pieces[index].new
        return next((line for line in new if is_code(self.new_lines[line])), new.start) + 1

    def pieces_in(self, node):
        """Returns the pieces of a statement, with the blank lines below it."""
        stop = node.end_lineno
        while stop < len(self.new_lines) and not self.new_lines[stop].strip():
            stop += 1
        return {
            index
            for index, (_, new) in enumerate(self.pieces)
            if new and node.lineno <= self.first_line(index) and new.stop <= stop
        }

    def put_back(self, indices):
        return Text(self.old_lines, self.new_lines, self.pieces, indices)

    def with_bodies(self, group):
        """Returns a group with the bodies of the statements of which it has an added head."""
        heads = {self.first_line(index) for index in group if not self.pieces[index].old}
        compound = [node for node in self.statements if hasattr(node, "body")]
        return group.union(*(self.inside[node] for node in compound if node.lineno in heads))

    def closures(self, groups):
        """Returns groups, each with the pieces without which a name is undefined or has no use."""
        groups = [self.with_bodies(frozenset(group)) for group in groups]
        new_text = "\n".join(self.new_lines)
        growing = range(len(groups))
        while growing:
            texts = [self.put_back(groups[number]) for number in growing]
            known, *said = ruff([new_text, *(text.text for text in texts)])
            known = {message for message, _ in known}
            before, growing = growing, []
            for number, text, messages in zip(before, texts, said, strict=True):
                group = groups[number]
                more = [self.tied(text, *one, group) for one in messages if one[0] not in known]
                if any(more):
                    groups[number] = self.with_bodies(group.union(*more))
                    growing.append(number)
        return groups

    def tied(self, text, message, line, group):
        """Returns the pieces that a loose end belongs to: where it stands, else what names it.

        Of an error of syntax, the smallest statement of which only a part is put back.
        """
        try:
            ast.parse(text.text)
        except SyntaxError:
            statements = self.inside.values()
            return next((s for s in statements if s & group and not s <= group), set())
        here = {text.origins[line - 1]} - {None} - group
        if here:
            return here
        (name,) = re.findall(r"[`'](?:\w+\.)*(\w+)[`']|$", message)[:1]
        for side, file_lines in ((1, self.new_lines), (0, self.old_lines)):
            naming = {
                index
                for index, piece in enumerate(self.pieces)
                if name and any(re.search(rf"\b{name}\b", file_lines[n]) for n in piece[side])
            }
            if naming - group:
                return naming - group
        return set()

    def units(self, indices):
        """Returns some pieces by unit, and all pieces that are put back with each.

        A docstring goes with the first line of code that changes in its function.
        """
        closures = dict(zip(indices, self.closures({index} for index in indices), strict=True))
        own = defaultdict(set)
        for index in indices:
            node = self.docstrings.get(index)
            code = self.inside.get(node, set()) & closures.keys() - self.docstrings.keys()
            key = closures[min(code, default=index)]
            if isinstance(node, ast.Module):
                key = frozenset(k for k in indices if self.docstrings.get(k) is node)
            elif not node:
                key = closures[index]
            own[key].add(index)
        return [(frozenset(pieces), closure | pieces) for closure, pieces in own.items()]

    def lines(self, indices):
        """Returns the changed lines of pieces, as `diff` prints them, without blank ones."""
        shown = []
        for old, new in (self.pieces[index] for index in sorted(indices)):
            shown += [f"-{self.old_lines[line]}" for line in old]
            shown += [f"+{self.new_lines[line]}" for line in new]
        return [line for line in shown if line[1:].strip()]
