"""Lets the last line of each page, which begins with "Next:", lead to the next of mkdocs.yml.

A recipe's leads back to their list: each is read by itself.
"""

import os
import re
import sys
from itertools import pairwise
from pathlib import Path

from tools.steps import ROOT


def main():
    names = re.findall(r" (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    if missing := {*names} ^ pages:
        sys.exit(f"these are in mkdocs.yml or in docs/, not in both: {' '.join(sorted(missing))}")
    recipes = [name for name in names if name.startswith("recipes/")]
    others = [name for name in names if name not in recipes[1:]]
    for name, next_name in [*pairwise(others), *((name, recipes[0]) for name in recipes[1:])]:
        title = (ROOT / "docs" / next_name).read_text().partition("\n")[0].removeprefix("# ")
        link = f"Next: [{title}]({os.path.relpath(next_name, Path(name).parent)})"
        page = ROOT / "docs" / name
        text = page.read_text()
        linked = re.sub(r"^Next: \[.*?\]\(\S*?\)", link, text, flags=re.MULTILINE)
        if linked != text:
            page.write_text(linked)


if __name__ == "__main__":
    main()
