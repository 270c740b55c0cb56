"""Puts each unit of a diff back, and says which promise of the script falls.

    python -m tools.units multigpu.py

It judges what is left, as `make check` does, and where the judge finds nothing, runs the tests that
name the script. docs/assets/units.json keeps what it finds, beside what a person writes there: the
sentence that the page shows (`without`), a test to run first (in `falls`), and why a line stays on
which nothing falls (`surplus`). Without files, it takes the units whose text, check or test has
changed since, and fails if another check falls now.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys

from tools.steps import ALL
from tools.units.answers import answer, stored
from tools.units.cut import UNITS

BY_HAND = ("without", "watch", "surplus")  # what a person writes there


def load():
    return json.loads(UNITS.read_text()) if UNITS.exists() else {}


def write(units):
    """Writes a unit a line; which lines go with it, the cut knows."""
    files = []
    for step in ALL:
        if step.file in units:
            kept = [{k: u[k] for k in u if k != "with"} for u in units[step.file]]
            lines = ",\n".join(json.dumps(unit, ensure_ascii=False) for unit in kept)
            files.append(f"{json.dumps(step.file)}: [\n{lines}\n]")
    UNITS.write_text("{\n" + ",\n".join(files) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="by default, what has changed")
    args = parser.parse_args()
    files = [step.file for step in ALL if step.file.endswith(".py")]
    if unknown := {*args.files} - {*files}:
        parser.error(f"no step leads to {', '.join(unknown)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    units = load()
    answers = {}  # as cut today; {} where there is none
    others = 0
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        asked = args.files or list(units)
        cuts = [pool.submit(stored, units.get(file, []), file) for file in asked]
        for file, cut in zip(asked, cuts, strict=True):
            answers[file] = [known for _, known, _ in cut.result()]
            for number, (unit, known, is_new) in enumerate(cut.result()):
                falls = known.get("falls", "")
                if args.files or is_new:
                    jobs[pool.submit(answer, file, unit, falls)] = file, number
        for job in concurrent.futures.as_completed(jobs):
            file, number = jobs[job]
            before, unit = answers[file][number], job.result()
            others += before.get("falls", unit["falls"]) != unit["falls"]
            by_hand = {key: before[key] for key in BY_HAND if key in before}
            answers[file][number] = unit | by_hand
            print(f"{file}: {unit['lines'][0]} …: {unit['falls'] or 'NOTHING'}", flush=True)
            write(units | {name: list(filter(None, found)) for name, found in answers.items()})
    if others:
        sys.exit(f"{others} units fall to another check or test than before: git diff {UNITS}")


if __name__ == "__main__":
    main()
