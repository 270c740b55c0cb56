"""Puts each unit of a diff back, and says which check or test falls without it.

    python -m tools.units multigpu.py

It judges what is left, as `make check` does, and where the judge finds nothing, runs the tests that
name the script. docs/assets/units.json keeps the name of what falls, which a person may replace by
that of a better test, and a sentence that a person writes. Without files, it takes the units of
which a line has changed, and fails if a sentence is missing. With files, it takes all their units:
say so after a change of a check or a test, which it does not notice by itself.
"""

import argparse
import os
import sys
from collections import Counter, defaultdict

from tools.steps import ALL
from tools.units.answers import answer
from tools.units.cut import Cut
from tools.units.stored import TODO, UNITS, load, owners, split, write

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
    args = parser.parse_args()
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
