"""Reads docs/assets/units.json: what falls without each unit of a step, and a sentence about it.

For each file, and each check or test, it has one string a unit: the sentence that the page shows,
and the digests of the changed lines, by which the unit is found wherever it moves. A unit without a
sentence has one of those that many units share.
"""

import base64
import functools
import hashlib
import json
import re
from collections import Counter, defaultdict

from tools.steps import ALL, ROOT

UNITS = ROOT / "docs" / "assets" / "units.json"
SIZE = 4  # characters of the digest of a line
DOCSTRING = "docstring"  # what falls without the lines at the top of a file
NOTHING = "nothing"  # what falls without a line that no check and no test needs
TODO = "TODO:"  # in place of a sentence that a person has yet to write
OF_DOCSTRING = "the docstring describes the script that this one builds on."
OF_IMPORT = "the imported name is undefined: NameError."


def first_sentence(lines, falls):
    """Returns the sentence about a unit that has just been asked."""
    if falls == DOCSTRING:
        return OF_DOCSTRING
    return OF_IMPORT if all(re.match("[+-](import|from) ", line) for line in lines) else TODO


def parse(falls, row):
    sentence, _, lines = row.rpartition(" ")
    shared = OF_DOCSTRING if falls == DOCSTRING else OF_IMPORT
    return {"lines": lines, "falls": falls, "without": sentence or shared}


@functools.cache
def load():
    """Returns the units of each file: of each its `lines`, what `falls`, and what is `without`."""
    return {
        file: [parse(falls, row) for falls, rows in groups.items() for row in rows]
        for file, groups in json.loads(UNITS.read_text()).items()
    }


def digests(lines):
    """Returns the digests of lines, with which a unit is found wherever it moves."""
    hashes = (hashlib.sha256(line.encode()).digest() for line in lines)
    return [base64.urlsafe_b64encode(found).decode()[:SIZE] for found in hashes]


def split(text):
    return [text[start : start + SIZE] for start in range(0, len(text), SIZE)]


def owners(lines, units):
    """Returns the number of the unit of each changed line, or None."""
    left = [Counter(split(unit["lines"])) for unit in units]
    found = []
    for key in digests(lines):
        number = next((n for n, keys in enumerate(left) if keys[key]), None)
        if number is not None:
            left[number][key] -= 1
        found.append(number)
    return found


def write(units, path=UNITS):
    """Writes a unit a line, file by file in the order of the steps."""
    files = {}
    for file in (step.file for step in ALL if step.file in units):
        files[file] = defaultdict(list)
        for unit in units[file]:
            shared = unit["without"] in (OF_DOCSTRING, OF_IMPORT)
            row = unit["lines"] if shared else f"{unit['without']} {unit['lines']}"
            files[file][unit["falls"]].append(row)
    path.write_text(json.dumps(files, ensure_ascii=False, indent=0) + "\n")
    load.cache_clear()
