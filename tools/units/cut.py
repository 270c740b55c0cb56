"""Cuts a step's diff into units: each the fewest changed lines that can be put back together.

A piece is an added line, a removed one, or one that stands for another. Put back alone, most leave
a name without its definition, or a definition without a use: the pieces that tie these loose ends
go with it. Pieces that take the same others with them are one unit, and each piece is in one.
"""

import ast
import bisect
import builtins
import collections
import difflib
import functools
import re
import subprocess
import symtable
from typing import NamedTuple

from tools.steps import ROOT

UNITS = ROOT / "docs" / "assets" / "units.json"  # the answers
ALIKE = 0.5  # from this ratio on, a removed line is an older form of an added one


class Piece(NamedTuple):
    """Lines of two files, numbered from 0, of which the new ones stand for the old ones."""

    old: range
    new: range


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


def join(pieces, new_lines):
    """Yields the pieces of a hunk, comments and decorators with the line below them.

    Blank lines go with the line above, and a removed line with the pair that follows it.
    """
    waiting = None
    for piece in pieces:
        if waiting:
            old = range(waiting.old.start, piece.old.stop) if waiting.old else piece.old
            piece = Piece(old, range(waiting.new.start, piece.new.stop))
        waiting = None if any(is_code(new_lines[line]) for line in piece.new) else piece
        if not waiting:
            yield piece
    if waiting:
        yield waiting


def with_decorator(old, new, new_lines):
    """Returns an added hunk that ends with the next function's decorator, with its own in place."""
    last = new_lines[new.stop - 1]
    if not old and last.lstrip().startswith("@") and last == new_lines[new.start - 1]:
        return range(old.start - 1, old.start - 1), range(new.start - 1, new.stop - 1)
    return old, new


def pieces(base, file, old_lines, new_lines):
    """Returns the pieces of the diff that `diff -U0` prints."""
    result = subprocess.run(["diff", "-U0", base, file], cwd=ROOT, capture_output=True, text=True)
    found = []
    for header in re.findall(r"^@@ -(\S+) \+(\S+) @@", result.stdout, re.MULTILINE):
        sides = []
        for side in header:
            start, _, count = side.partition(",")
            count = int(count or 1)
            start = int(start) - (count > 0)  # without lines, it is the line before
            sides.append(range(start, start + count))
        sides = with_decorator(*sides, new_lines)
        for piece in join(match(*sides, old_lines, new_lines), new_lines):
            blank = not piece.old and not any(new_lines[line].strip() for line in piece.new)
            if blank and found and found[-1].new.stop == piece.new.start:
                found[-1] = Piece(found[-1].old, range(found[-1].new.start, piece.new.stop))
            else:
                found.append(piece)
    return found


class Text:
    """A file in which some pieces are put back; `origins` has each line's piece, if it has one."""

    def __init__(self, old_lines, new_lines, pieces, put_back):
        lines, self.origins, self.starts = [], [], {}
        position = 0
        for index, piece in enumerate(pieces):
            side = new_lines[piece.new.start : piece.new.stop]
            if index in put_back:
                side = old_lines[piece.old.start : piece.old.stop]
            before = new_lines[position : piece.new.start]
            self.starts[index] = len(lines) + len(before) + 1
            lines += [*before, *side]
            self.origins += [None] * len(before) + [index] * len(side)
            position = piece.new.stop
        lines += new_lines[position:]
        self.origins += [None] * (len(lines) - len(self.origins))
        self.text = "\n".join(lines) + "\n"


class Names:
    """What a text defines and uses, each with its lines, and the calls that it gets wrong.

    `x` is a variable of the module, `f():x` one of a function, `Class.x` what its methods know as
    `self.x`, and `.x` the attribute of another object, or an argument of the command line.
    """

    def __init__(self, text):
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.defined, self.used, self.wrong = {}, {}, {}
        self.functions = {}  # and by how many its calls have fewer arguments
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, (node, 0))
            elif isinstance(node, ast.ClassDef):
                self.note_class(node)
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self.note_call(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.note(self.used, f".{node.attr}", node)
        self.note_variables(symtable.symtable(text, "", "exec"))

    @staticmethod
    def note(where, name, node):
        where.setdefault(name, set()).add(node.lineno)

    def note_class(self, tree):
        """Notes methods, and attributes of `self`: those that __init__ sets, by it alone."""
        methods = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
        initial = set()
        for method in sorted(methods, key=lambda method: method.name != "__init__"):
            constructs = method.name == "__init__"
            self.functions[tree.name if constructs else method.name] = (method, 1)
            if not method.name.startswith("__"):
                self.note(self.defined, f"{tree.name}.{method.name}", method)
                self.note(self.defined, f".{method.name}", method)
            augmented = {n.target for n in ast.walk(method) if isinstance(n, ast.AugAssign)}
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                    name = f"{tree.name}.{node.attr}"
                    if isinstance(node.ctx, ast.Load) or node in augmented:
                        self.note(self.used, name, node)
                    elif constructs or name not in initial:
                        initial |= {name} if constructs else set()
                        self.note(self.defined, name, node)
                        self.note(self.defined, f".{node.attr}", node)

    def note_call(self, node):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "add_argument":
            self.note(self.defined, f".{node.args[0].value.lstrip('-')}", node)
        function, bound = self.functions.get(name, (None, 0))
        if function and not accepts(function.args, bound, node):
            self.note(self.wrong, name, node)
            self.note(self.wrong, name, function)
        for argument in node.args:  # as mp.spawn's
            if getattr(argument, "id", "") in self.functions:
                self.note(self.used, f"{argument.id} itself", node)

    def note_variables(self, module):
        """Notes variables, function by function, as Python's own table of symbols sees them."""
        nodes = {(getattr(n, "name", ""), getattr(n, "lineno", 0)): n for n in self.nodes}
        tables = [module]
        occur = functools.cache(self.occurrences)  # of the module for each comprehension
        for table in tables:
            tables += table.get_children()
            places = occur(nodes.get((table.get_name(), table.get_lineno()), self.tree))
            inner = [symbol for child in table.get_children() for symbol in child.get_symbols()]
            free = {symbol.get_name() for symbol in inner if symbol.is_free()}
            for symbol in table.get_symbols():
                name = symbol.get_name()
                outer = symbol.is_global() or table is module
                scoped = name if outer else f"{table.get_name()}():{name}"
                if symbol.is_referenced() or name in free:
                    self.used.setdefault(scoped, set()).update(places[name])
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_parameter():
                    self.defined.setdefault(scoped, set()).update(places[name])

    @functools.cached_property
    def places(self):
        """Returns each name of the text, in the order of their lines."""
        found = []
        for node in self.nodes:
            names = [getattr(node, key, None) for key in ("id", "name", "arg")]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
            found += [(getattr(node, "lineno", 0), name) for name in names if name]
        return sorted(found)

    def occurrences(self, tree):
        """Returns the lines of each name in a function or class, or in the module."""
        places = self.places
        if tree is not self.tree:
            start = bisect.bisect_left(places, (tree.lineno,))
            places = places[start : bisect.bisect_left(places, (tree.end_lineno + 1,))]
        lines = collections.defaultdict(set)
        for line, name in places:
            lines[name].add(line)
        return lines

    def missing(self):
        """Returns the names that are used and not defined; of attributes, torch defines many."""
        return {n for n in self.used if n not in self.defined and n not in dir(builtins)}

    def useless(self):
        return self.defined.keys() - self.used.keys()


def accepts(args, bound, call):
    """Returns whether a function with these arguments can be called so."""
    positional = [arg.arg for arg in args.posonlyargs + args.args][bound:]
    keywords = {keyword.arg for keyword in call.keywords}
    if None in keywords or any(isinstance(arg, ast.Starred) for arg in call.args):
        return True
    known = {*positional, *(arg.arg for arg in args.kwonlyargs)}
    required = {*positional[: len(positional) - len(args.defaults)]}
    given = {*positional[: len(call.args)], *keywords}
    fits = len(call.args) <= len(positional) or args.vararg
    return fits and (keywords <= known or args.kwarg) and given >= required


class Cut:
    """The pieces of a step, and which go together."""

    def __init__(self, base, file):
        self.old_lines, self.new_lines = (
            (ROOT / name).read_text().splitlines() for name in (base, file)
        )
        self.pieces = pieces(base, file, self.old_lines, self.new_lines)
        self.old = Names("\n".join(self.old_lines) + "\n")
        self.new = Names("\n".join(self.new_lines) + "\n")
        self.statements = [n for n in ast.walk(self.new.tree) if isinstance(n, ast.stmt)]
        self.statements.sort(key=lambda node: node.end_lineno - node.lineno)
        self.inside = {node: self.pieces_in(node) for node in self.statements}

    def pieces_in(self, node):
        """Returns the pieces of a statement, with the blank lines below it."""
        start = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
        stop = node.end_lineno
        while stop < len(self.new_lines) and not self.new_lines[stop].strip():
            stop += 1
        return {
            index
            for index, (_, new) in enumerate(self.pieces)
            if new and start <= new.start + self.comments(new) and new.stop <= stop
        }

    def comments(self, lines):
        """Returns how many comments and decorators stand above the code of a piece."""
        return next((n for n, j in enumerate(lines) if is_code(self.new_lines[j])), 0)

    def put_back(self, indices):
        return Text(self.old_lines, self.new_lines, self.pieces, indices)

    def loose_ends(self, text):
        """Yields the name of each loose end that the new file has not, and its lines."""
        names = Names(text)
        known = self.old.defined.keys() | self.new.defined.keys()
        for name in names.missing() - self.new.missing():
            if name in known or "." not in name:
                yield name, names.used[name]
        for name in names.useless() - self.new.useless() - self.old.useless():
            yield name, names.defined[name]
        for name in names.wrong.keys() - self.new.wrong.keys():
            yield name, names.wrong[name]
        for known in (self.new, self.old):  # passed on, as to mp.spawn, which calls it as before
            for name in names.functions.keys() & known.functions.keys():
                args = {ast.dump(n.functions[name][0].args) for n in (names, known)}
                passed = f"{name} itself"
                if len(args) > 1 and passed in known.used and passed in names.used:
                    yield name, names.used[passed]

    def closure(self, group):
        """Returns the pieces that must be put back with some, so that the file still starts."""
        while True:
            group = group.union(*map(self.body, group))
            text = self.put_back(group)
            try:
                ends = list(self.loose_ends(text.text))
            except SyntaxError as error:
                more = self.around(group, text, error.lineno)
            else:
                more = set().union(*(self.tied(text, *end, group) for end in ends))
            if more <= group:
                return frozenset(group)
            group = group | more

    def body(self, index):
        """Returns the pieces of the statement that an added line is the head of."""
        old, new = self.pieces[index]
        for node in self.statements:
            head = new and new.start + self.comments(new) + 1
            if hasattr(node, "body") and node.lineno == head and not old:
                return self.inside[node]
        return set()

    def around(self, group, text, line):
        """Returns the pieces of the smallest statement of which a part is put back near a line."""
        for index in sorted(group, key=lambda index: abs(text.starts[index] - line)):
            for inside in self.inside.values():
                if index in inside and not inside <= group:
                    return inside
        return set()

    def tied(self, text, name, lines, group):
        """Returns the pieces that a loose end belongs to: where it stands, else what names it."""
        here = {text.origins[line - 1] for line in lines} - {None} - group
        if here:
            return here
        word = re.compile(rf"\b{re.split('[.:]', name)[-1]}\b")
        for side, file_lines in ((1, self.new_lines), (0, self.old_lines)):
            naming = {
                index
                for index, piece in enumerate(self.pieces)
                if index not in group and any(word.search(file_lines[n]) for n in piece[side])
            }
            if naming:
                return naming
        return set()

    def is_text(self, index):
        """Returns the docstring that a piece is a part of, and the node whose docstring it is."""
        for node in ast.walk(self.new.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
                first = node.body[0]
                is_docstring = isinstance(first, ast.Expr) and ast.get_docstring(node) is not None
                if is_docstring and index in self.inside[first]:
                    return node
        return None

    @functools.cached_property
    def units(self):
        """Returns the units: the pieces of each, and all pieces that are put back with them."""
        texts = {index: self.is_text(index) for index in range(len(self.pieces))}
        code = [index for index, node in texts.items() if not node]
        closures = {index: self.closure(frozenset({index})) for index in code}
        own = {}
        for index, node in texts.items():
            if isinstance(node, ast.Module):
                closure = frozenset(k for k, other in texts.items() if other is node)
            elif node:  # a docstring goes with the first line of code that changes below its head
                first = min(self.inside[node] & closures.keys(), default=None)
                closure = closures.get(first, frozenset({index}))
            else:
                closure = closures[index]
            own.setdefault(closure, set()).add(index)
        return [(frozenset(pieces), closure | pieces) for closure, pieces in own.items()]

    def at(self, text, line):
        """Returns the pieces of the statement in which a line of a text stands."""
        for node in sorted(ast.walk(ast.parse(text.text)), key=lambda n: -getattr(n, "lineno", 0)):
            simple = isinstance(node, ast.stmt) and not hasattr(node, "body")
            if simple and node.lineno <= line <= node.end_lineno:
                return set(text.origins[node.lineno - 1 : node.end_lineno]) - {None}
        return {text.origins[line - 1]} - {None}

    def lines(self, indices):
        """Returns the changed lines of pieces, as `diff` prints them, without blank ones."""
        shown = []
        for old, new in (self.pieces[index] for index in sorted(indices)):
            shown += [f"-{self.old_lines[line]}" for line in old]
            shown += [f"+{self.new_lines[line]}" for line in new]
        return [line for line in shown if line[1:].strip()]
