"""Puts each unit of a diff back, and says which check or test falls without it.

    python -m tools.units multigpu.py
    python -m tools.units --where gpt/hsdp.py:120

It judges what is left, as `make check` does, and where the judge finds nothing, runs the tests that
name the script. docs/assets/units.json keeps the name of what falls, which a person may replace by
that of a better test, and a sentence that a person writes. Without files, it takes the units of
which a line has changed, and fails if a sentence is missing. With files, it takes all their units:
say so after a change of a check or a test, which it does not notice by itself.
"""

import argparse
import os
import shlex
import sys
from collections import Counter, defaultdict

from tools.steps import ALL, ROOT, diff_lines
from tools.units.answers import answer, full_name
from tools.units.cut import Cut, hunks
from tools.units.stored import DOCSTRING, NOTHING, TODO, UNITS, load, owners, split, write

BASES = {step.file: step.base for step in ALL if step.file.endswith(".py")}


def sort_pieces(cut, units):
    """Returns the pieces of each stored unit, by its number, and those that are to be cut anew.

    These have no unit, or one of which a line has changed.
    """
    owned = owners(cut.lines(range(len(cut.pieces))), units)
    counts, left = Counter(owned), iter(owned)
    known, rest = defaultdict(list), []
    for index in range(len(cut.pieces)):
        numbers = {next(left) for _ in cut.lines({index})} - {None}
        whole = {n for n in numbers if counts[n] == len(split(units[n]["lines"]))}
        for number in whole:
            known[number].append(index)
        if not whole:
            rest.append(index)
    return known, rest


def where(place):
    """Returns which check or test holds a line of a file, and the sentence about it."""
    file, _, number = place.rpartition(":")
    if file not in BASES or not number.isdigit():
        raise ValueError(f"{place} is no FILE:LINE of a file that builds on another")
    text = (ROOT / file).read_text().splitlines()
    index = int(number) - 1
    if not (0 <= index < len(text) and text[index].strip()):
        raise ValueError(f"{file} has no line {number}, or an empty one")
    line = f"+{text[index]}"
    while file in BASES:
        text = (ROOT / file).read_text().splitlines()
        pieces = list(hunks(BASES[file], file))
        added = [i for _, new in pieces for i in new if text[i].strip()]
        if index in added:
            lines, units = diff_lines(BASES[file], file), load().get(file, [])
            numbers = zip(lines, owners(lines, units), strict=True)
            number = [n for changed, n in numbers if changed[0] == "+"][added.index(index)]
            if number is None:
                raise ValueError(f"{file}:{index + 1} has no answer: python -m tools.units {file}")
            unit = units[number]
            return f"{file}:{index + 1} {line}\n{holder(unit)}\nWithout it: {unit['without']}"
        index += sum(len(old) - len(new) for old, new in pieces if new.stop <= index)
        file = BASES[file]
    raise ValueError(f"{place} stands in {file} already, which builds on no other file")


def holder(unit):
    name = unit["falls"]
    if name.startswith("test_"):
        return shlex.join(["pytest", "-n", "0", "-m", "", full_name(name)])
    return "no test" if name in (DOCSTRING, NOTHING) else f"make check, {name}"


def ask(file, everything):
    """Asks what falls without the units of a file, and stores it; yields what is wrong then."""
    cut, stored = Cut(BASES[file], file), load().get(file, [])
    known, rest = sort_pieces(cut, stored)
    units = [unit for number, unit in enumerate(stored) if number in known]
    for unit in stored:
        if unit not in units:
            print(f"{file}: a unit has changed, of which it said: {unit['without']}")
    asked = [(unit, {}) for unit in cut.units(rest)]
    if everything:
        closures = cut.closures(known.values())
        for (number, own), closure in zip(known.items(), closures, strict=True):
            asked.append(((frozenset(own), closure), stored[number]))
    write(load() | {file: units})
    for unit, before in asked:
        line = f"{file}: {cut.lines(unit[0])[0]} …"
        found = answer(cut, file, unit, before.get("falls", ""))
        print(f"{line}: {found['falls']}", flush=True)
        if before:
            units.remove(before)
            found["without"] = before["without"]
            if found["falls"] != before["falls"]:
                yield f"{line}: {before['falls']} does not fall"
        units.append(found)
        write(load() | {file: units})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="by default, all, but only what has changed")
    parser.add_argument("--where", metavar="FILE:LINE", help="print which test holds a line")
    args = parser.parse_args()
    if args.where:
        try:
            return print(where(args.where))
        except ValueError as error:
            sys.exit(str(error))
    if unknown := {*args.files} - {*BASES}:
        parser.error(f"no step leads to {', '.join(unknown)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    wrong = [said for file in args.files or BASES for said in ask(file, bool(args.files))]
    for file, units in load().items():
        wrong += [f"{file}: write what is without {u}" for u in units if u["without"] == TODO]
    if wrong:
        sys.exit("\n".join([*wrong, f"see git diff {UNITS}"]))


if __name__ == "__main__":
    main()
