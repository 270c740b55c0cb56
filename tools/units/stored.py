"""Reads docs/assets/units.json: of each unit, digests of its lines, and what falls without it."""

import base64
import functools
import hashlib
import json
from collections import Counter

from tools.steps import ALL, ROOT

UNITS = ROOT / "docs" / "assets" / "units.json"
SIZE = 4  # characters of the digest of a line


@functools.cache
def load():
    return json.loads(UNITS.read_text())


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
    files = []
    for file in (step.file for step in ALL if step.file in units):
        lines = ",\n".join(json.dumps(unit, ensure_ascii=False) for unit in units[file] if unit)
        files.append(f"{json.dumps(file)}: [\n{lines}\n]")
    path.write_text("{\n" + ",\n".join(files) + "\n}\n")
