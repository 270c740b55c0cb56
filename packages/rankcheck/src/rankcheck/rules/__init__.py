"""The rules: their sections in the chapters beside this file, and a small script that breaks each.

A section's diff mends that script: its + lines are those of a right one in the folder scripts.
"""

import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
HEADING = re.compile(r"## (RC\d{3}): (.+)")
DIFF = re.compile(r"^```diff\n--- (\w+\.py)\n((?:[-+ @].*\n|\n)+)```$", re.M)
NOT_SHOWN = re.compile(r"^Not shown here: .+", re.M)


class Rule(NamedTuple):
    id: str
    title: str
    text: str  # its whole section
    script: str  # the name of the right script to which the diff applies, or ""
    diff: str  # its lines; a line @@ separates places


def load():
    """Returns all rules by their ids, in the order of the chapters."""
    rules = {}
    for file in sorted(FOLDER.glob("[0-9]_*.md")):
        title, *sections = re.split(r"^(?=## )", file.read_text(), flags=re.M)
        if not re.fullmatch(r"# .+\n+", title):
            raise ValueError(f"{file.name} does not begin with its title alone")
        for section in sections:
            rule = parse(section, file.name)
            if rule.id in rules:
                raise ValueError(f"{file.name}, {rule.id}: there are two sections of this id")
            rules[rule.id] = rule
    return rules


def parse(section, file):
    heading = HEADING.fullmatch(section.partition("\n")[0])
    where = f"{file}, {section.partition(':')[0]}"
    if not heading or heading[1][2] != file[0]:
        raise ValueError(f"{where}: its heading is not '## RC{file[0]}..: TITLE'")
    diffs = DIFF.findall(section)
    if len(diffs) + len(NOT_SHOWN.findall(section)) != 1 or section.count("```") != 2 * len(diffs):
        raise ValueError(f"{where}: it has neither one diff nor a line 'Not shown here: ...'")
    script, diff = diffs[0] if diffs else ("", "")
    return Rule(*heading.groups(), section.strip() + "\n", script, diff)


def places(rule):
    """Returns, for each place of the diff, its lines in the faulty script and in the right one."""
    found = []
    for lines in re.split(r"^@@\n", rule.diff, flags=re.M):
        faulty, right = (
            "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in kinds)
            for kinds in ("- \n", "+ \n")
        )
        found.append((faulty, right))
    return found


def example(rule):
    """Returns the smallest script that breaks a rule."""
    text = "\n" + (FOLDER / "scripts" / rule.script).read_text()
    for faulty, right in places(rule):
        if text.count("\n" + right) != 1:
            raise ValueError(f"{rule.id}: {rule.script} does not have these lines once:\n{right}")
        text = text.replace("\n" + right, "\n" + faulty)
    return text[1:]
