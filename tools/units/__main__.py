"""Puts each unit of a diff back, and says which promise of the script falls.

    python -m tools.units multigpu.py
    python -m tools.units --where gpt/hsdp.py:120

It judges what is left, as `make check` does, and where the judge finds nothing, runs the tests that
name the script. docs/assets/units.json keeps what it finds, beside what a person writes there: the
sentence that the page shows (`without`), a test to run first (in `falls`), and why a line stays on
which nothing falls (`surplus`). Without files, it takes the units whose text, check or test has
changed since, and fails if another check falls now, or a sentence is missing.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from collections import Counter

from tools.steps import ALL, ROOT, diff_lines
from tools.units.answers import DOCSTRING, answer, digest, full_name
from tools.units.cut import Cut, hunks
from tools.units.stored import UNITS, load, owners, split, write

BY_HAND = ("without", "watch", "surplus")  # what a person writes there
BASES = {step.file: step.base for step in ALL if step.file.endswith(".py")}


def is_fresh(unit):
    return unit.get("of") == digest(unit["lines"], unit["falls"])


def whole_units(lines, units):
    """Returns the number of each line's unit, or None if it has none, or one that has changed."""
    numbers = owners(lines, units)
    counts = Counter(numbers)
    whole = {n for n, unit in enumerate(units) if counts[n] == len(split(unit["lines"]))}
    return [n if n in whole else None for n in numbers]


def changed(file, units):
    """Returns whether a unit's text, check or test has changed."""
    numbers = whole_units(diff_lines(BASES[file], file), units)
    return {*numbers} != {*range(len(units))} or not all(map(is_fresh, units))


def cut_anew(file, units):
    """Returns a step's cut, each of its units with all that goes with it, and what is known of it.

    What is stored stays together; only lines without a unit, or with one that has changed, are cut.
    """
    cut = Cut(BASES[file], file)
    numbers = iter(whole_units(cut.lines(range(len(cut.pieces))), units))
    pieces, rest = {}, []
    for index in range(len(cut.pieces)):
        of_lines = {next(numbers) for _ in cut.lines({index})}
        for number in of_lines - {None}:
            pieces.setdefault(number, []).append(index)
        if of_lines == {None}:
            rest.append(index)
    closures = cut.closures(pieces.values())
    found = [
        ((frozenset(own), all_of), units[n])
        for (n, own), all_of in zip(pieces.items(), closures, strict=True)
    ]
    found += [(unit, {}) for unit in cut.units(rest)]
    return cut, sorted(found, key=lambda one: min(one[0][0]))


def where(place):
    """Returns which check or test holds a line of a file, and the sentence about it."""
    file, _, number = place.rpartition(":")
    if file not in BASES or not number.isdigit():
        raise ValueError(f"{place} is no FILE:LINE of a file that builds on another")
    text = (ROOT / file).read_text().splitlines()
    index = int(number) - 1
    if not (0 <= index < len(text) and text[index].strip()):
        raise ValueError(f"{file} has no line {number}, or an empty one")
    while file in BASES:
        sides = [(ROOT / name).read_text().splitlines() for name in (BASES[file], file)]
        lines, at, moved = [], None, 0
        for old, new in hunks(BASES[file], file):
            lines += [f"-{sides[0][line]}" for line in old]
            at = len(lines) + index - new.start if index in new else at
            lines += [f"+{sides[1][line]}" for line in new]
            moved = old.stop - new.stop if new.stop <= index else moved
        if at is not None:
            number = owners(lines, load().get(file, []))[at]
            if number is None:
                raise ValueError(f"{file}:{index + 1} has no answer: python -m tools.units {file}")
            unit = load()[file][number]
            return f"{file}:{index + 1} {lines[at]}\n{holder(unit)}\nWithout it: {unit['without']}"
        file, index = BASES[file], index + moved
    raise ValueError(f"{place} stands in {file} already, which builds on no other file")


def holder(unit):
    name = unit["falls"]
    if "::" in name:
        return f"pytest -n 0 -m '' {full_name(name)}"
    if name and name != DOCSTRING:
        return f"make check, {name}"
    return f"no test: {unit.get('surplus', 'a docstring')}"


def ask(files, everything):
    """Asks what falls without the units of files, and stores it; returns what is wrong then."""
    units, wrong = dict(load()), []
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for file in files:
            cut, found = cut_anew(file, units.get(file, []))
            answers = [known for _, known in found]
            for unit in units.get(file, []):
                if unit not in answers:
                    print(f"{file}: a unit has changed, of which it said: {unit['without']}")
            units[file] = answers
            for number, (unit, known) in enumerate(found):
                if everything or not known or not is_fresh(known):
                    job = pool.submit(answer, cut, file, unit, known.get("falls", ""))
                    jobs[job] = answers, number, f"{file}: {cut.lines(unit[0])[0]}"
        for job in concurrent.futures.as_completed(jobs):
            answers, number, what = jobs[job]
            before, unit = answers[number], job.result()
            print(f"{what} …: {unit['falls'] or 'NOTHING'}", flush=True)
            if before.get("falls", unit["falls"]) != unit["falls"]:
                wrong.append(f"{what}: {before['falls']} does not fall, but {unit['falls']}")
            answers[number] = unit | {key: before[key] for key in BY_HAND if key in before}
            write(units)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="by default, those in which something has changed")
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
    files = args.files or [file for file in BASES if changed(file, load().get(file, []))]
    wrong = ask(files, bool(args.files))
    load.cache_clear()
    for file, units in load().items():
        for unit in units:
            if not (unit.get("without") and (unit["falls"] or unit.get("surplus"))):
                number = units.index(unit)
                wrong.append(
                    f"{file}: unit {number} lacks `without`, or falls to nothing: `surplus`?"
                )
    if wrong:
        sys.exit("\n".join([*wrong, f"see git diff {UNITS}"]))


if __name__ == "__main__":
    main()
