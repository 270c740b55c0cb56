"""Checks the pages in docs/: every unit that a step changes stands on one page, beside its prose.

Also, that no diff is typed by hand, there or in README, and that no page takes long to read, unless
it is a reference, nor the stages' pages together; what unfolds there, hints and answers, is an
exercise and counts for its page only. Nor may a script be missing in tools/steps.py, or a quote of
one be stale.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tools.chain.quotes import FILLED, lines_outside, stale
from tools.pages.fences import DOCUMENTED, changed_units
from tools.steps import ROOT, STAGES

FENCE = re.compile(r'<!-- \[\[\[cog fence\("(.+)", "(.+)"\) \]\]\] -->')
CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
DETAILS = ("<details", "</details")
NO_WORDS = re.compile(r"\]\(\S+\)|<!--.*-->|</?summary>")
MIN_WORDS = 5  # of prose for each block under a heading
WORDS_PER_MINUTE = 200
MAX_MINUTES = 8  # to read any page but these, in which one looks something up
REFERENCES = ["docs/errors.md", "docs/launchers.md", "docs/choose.md", "docs/audited.md"]
MAX_STAGE_MINUTES = 25  # to read those of the stages, with nothing unfolded


class Block(NamedTuple):
    where: str  # the page and the line
    unit: tuple[str, str]  # the file that a step leads to, and the unit's name
    section: int


def typed_diffs(name, text):
    lines = lines_outside(FILLED, text)
    typed = [number for number, line in lines if line.startswith("```diff")]
    return [f"{name}:{number}: a diff typed by hand: let cog fill it" for number in typed]


def parse(name, text):
    """Returns a page's blocks, and the words of prose of each section.

    Words that unfold, between <details> and </details>, are those of the section "folded".
    """
    blocks, prose = [], Counter()
    section, folded = 0, False
    for number, line in lines_outside(CODE, text):
        if line.startswith("#"):
            section += 1
        elif line.startswith(DETAILS):
            folded = line.startswith("<details")
        else:
            prose["folded" if folded else section] += len(NO_WORDS.sub("", line).split())
        if found := FENCE.fullmatch(line):
            blocks.append(Block(f"{name}:{number}", found.groups(), section))
    return blocks, prose


def minutes(words):
    return words / WORDS_PER_MINUTE


def reading_time(text):
    """Returns how long it takes to read the prose of a page, without what unfolds, in words."""
    prose = parse("", text)[1]
    count = max(round(minutes(prose.total() - prose["folded"])), 1)
    return "1 minute to read" if count == 1 else f"{count} minutes to read"


def check_blocks(blocks):
    """Returns what is wrong with blocks: twice, or missing. (cog fails on one that is unknown.)"""
    problems, first = [], {}
    for where, (file, name), _ in blocks:
        if (file, name) in first:
            problems.append(f"{where}: {name} of {file} stands at {first[file, name]} already")
        first.setdefault((file, name), where)
    units = [(step.file, name) for step in DOCUMENTED for name in changed_units(step)]
    missing = [unit for unit in units if unit not in first]
    return problems + [f'{f}: {name} is on no page: fence("{f}", "{name}")' for f, name in missing]


def check_page(page):
    """Returns the blocks of a page, its words by section, and what is wrong with them."""
    name = page.relative_to(ROOT)
    blocks, prose = parse(name, page.read_text())
    problems = typed_diffs(name, page.read_text())
    sections = Counter(found.section for found in blocks)
    for found in blocks:
        if prose[found.section] < MIN_WORDS * sections[found.section]:
            problems.append(f"{found.where}: no prose beside {found.unit[1]} of {found.unit[0]}")
    lines = lines_outside(CODE, page.read_text())
    problems += [f"{name}:{number}: {line}" for number, line in lines if "TODO" in line]
    words = prose.total()
    if minutes(words) > MAX_MINUTES and str(name) not in REFERENCES:
        problems.append(f"{name}: {minutes(words):.1f} minutes to read, of {MAX_MINUTES}")
    return blocks, prose, problems


def unlisted_scripts():
    """Yields a line for each recipe, job file or script with a trainer that is in no step."""
    others = [*ROOT.glob("gpt/*.py"), *ROOT.glob("by_hand/*.py")]
    scripts = [path for path in others if "class Trainer" in path.read_text()]
    scripts += [*ROOT.glob("recipes/*.py"), *ROOT.glob("slurm/*.sbatch")]
    files = {str(path.relative_to(ROOT)) for path in scripts}
    for file in sorted(files - {step.file for step in DOCUMENTED}):
        yield f"{file} is in no step: write a line for it into tools/steps.py"


def check(docs):
    """Returns what is wrong with the pages, and where."""
    problems, blocks, prose = [], [], {}
    for page in sorted(docs.rglob("*.md")):
        found, prose[str(page.relative_to(docs))], wrong = check_page(page)
        blocks += found
        problems += wrong
    problems += [*check_blocks(blocks), *unlisted_scripts(), *stale()]
    readme = docs.parent / "README.md"
    problems += typed_diffs(readme.name, readme.read_text())
    pages = [prose[f"{Path(stage).stem}.md"] for stage in STAGES]
    stages = minutes(sum(words.total() - words["folded"] for words in pages))
    if stages > MAX_STAGE_MINUTES:
        problems.append(f"the stages' pages: {stages:.1f} minutes, of {MAX_STAGE_MINUTES}")
    return problems


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if problems := check(ROOT / "docs"):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
