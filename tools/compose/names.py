"""Finds what is no conflict of lines, but of names or places: each with status 0 until it runs.

Said is only what no file that went into a script has alone: their own affairs are not judged.
"""

import ast
import itertools
import json
import subprocess
import sys
from collections import Counter

STATES = ("snapshot", "state_dict")  # in the names of methods that save or load


def strings(nodes):
    """Returns those of the nodes that are a text, as such."""
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def missing(definition):
    """Returns the attributes of self that a class uses, and that neither it nor a method sets."""
    of_self = [
        found
        for found in ast.walk(definition)
        if isinstance(found, ast.Attribute) and ast.unparse(found.value) == "self"
    ]
    known = {found.attr for found in of_self if isinstance(found.ctx, ast.Store)}
    known |= {found.name for found in definition.body if isinstance(found, ast.FunctionDef)}
    return {found.attr for found in of_self} - known


def read_names(tree):
    """Returns by kind how often each name is defined, and those that are used but not defined."""
    arguments, methods, attributes = Counter(), Counter(), Counter()
    keys, read_keys, args, behind_return = set(), set(), set(), set()
    undefined = set()
    for node in ast.walk(tree):
        children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.ClassDef):
            functions = [child for child in children if isinstance(child, ast.FunctionDef)]
            methods.update(f"{node.name}.{function.name}" for function in functions)
            attributes.update(
                f"{node.name}.{found.attr}"
                for found in ast.walk(node)
                if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store)
                if ast.unparse(found.value) == "self"
            )
            undefined |= {f"self.{name} is used, but not defined" for name in missing(node)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "add_argument":
                arguments.update(strings(node.args))
            elif node.func.attr == "get" and ast.unparse(node.func.value) == "snapshot":
                read_keys.update(strings(node.args[:1]))
        elif isinstance(node, ast.Dict):
            keys.update(strings(node.keys))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.update(strings([node.slice]))
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "snapshot":
            read_keys.update(strings([node.slice]))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("args", "self.args"):
            args.add((node.attr, type(node.ctx)))
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for statement, after in itertools.pairwise(body if isinstance(body, list) else []):
                if isinstance(statement, ast.Return | ast.Raise):
                    behind_return.add(ast.unparse(after).partition("\n")[0])
    known = {name.lstrip("-").replace("-", "_") for name in arguments}
    known |= {name for name, context in args if context is ast.Store}
    undefined |= {f"args.{name} is used, but not defined" for name, _ in args if name not in known}
    undefined |= {f"snapshot[{key!r}] is read, but not saved" for key in read_keys - keys}
    undefined |= {f"after a return, so it never runs: {line}" for line in behind_return}
    return {"argument": arguments, "method": methods, "attribute": attributes}, undefined


def ruff(text):
    """Returns what ruff says of names, or of names that it cannot look for them."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F", "--output-format"]
    result = subprocess.run([*command, "json", "-"], input=text, capture_output=True, text=True)
    if result.returncode > 1 or not result.stdout:
        print("undefined names were not checked: install ruff for that", file=sys.stderr)
        return set()
    return {found["message"] for found in json.loads(result.stdout)}


def functions_of(text):
    """Returns the name of the function in which each line is, or "", by number from 0."""
    names = [""] * (text.count("\n") + 1)
    for node in ast.walk(ast.parse(text)):  # the outer ones come first
        if isinstance(node, ast.FunctionDef):
            for index in range(node.lineno - 1, node.end_lineno):
                names[index] = node.name
    return names


def find_problems(lines, sides, base):
    """Yields a line on each, of the lines of a script, the text of each file, and of their base."""
    text = "\n".join(line for line, _ in lines)
    counts, undefined = read_names(ast.parse(text))
    known = {file: read_names(ast.parse(side)) for file, side in sides.items()}
    base_counts, _ = read_names(ast.parse(base))
    for kind, found in counts.items():
        for name, count in found.items():
            adding = [f for f in sides if known[f][0][kind][name] > base_counts[kind][name]]
            most = max(known[file][0][kind][name] for file in sides)
            is_new = kind != "attribute" or not base_counts[kind][name]  # may be set again
            if len(adding) > 1 and count > most and is_new:
                yield f"{kind} {name} is in both: {' and '.join(adding)}"
    yield from sorted(undefined.difference(*(missing for _, missing in known.values())))
    yield from sorted(ruff(text).difference(*map(ruff, sides.values())))
    places = {}
    for file, side in sides.items():
        for line, name in zip(side.splitlines(), functions_of(side), strict=False):
            places.setdefault((file, line), set()).add(name)
    functions = functions_of(text)
    for number, ((line, file), name) in enumerate(zip(lines, functions, strict=True), 1):
        before = places.get((file, line), {name})
        if line.strip() and name not in before and before & {*functions}:  # else it is renamed
            yield f"line {number} was in {before.pop()}, now in {name or 'none'}: {line.strip()}"


def lines_to_look_at(own, own_text, base_text, changed):
    """Yields one's own lines that save or load, where a part changes how states are saved."""
    before = {*base_text.splitlines()}
    for line, name in zip(own_text.splitlines(), functions_of(own_text), strict=False):
        if any(word in name for word in STATES) and line.strip() and line not in before:
            yield f"look at {name} of {own}, because {changed} saves differently: {line.strip()}"
