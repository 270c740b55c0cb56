"""Begins a recipe, with all files and lines that one needs: recipe.py clip multinode.py"""

import sys

from tools.steps import ALL, ROOT, changed_lines

PAGE = """# TODO: what NAME.py adds

TODO: when a project needs it, in two sentences, and the command that shows it.

<details markdown="1">
<summary>The diff of the docstring</summary>

<!-- [[[cog fence("recipes/NAME.py", "docstring") ]]] -->
<!-- [[[end]]] -->

</details>

TODO: a heading for each idea, with a fence for each function that changes, and why it must.

Next: []().
"""
MAX_LENGTH = 100  # of a line
TEST = '''"""recipes/NAME.py does what its page promises."""

from helpers import assert_trained


def test_NAME(shell):
    shell.ranks("recipes/NAME.py 2 1", 2).succeeds()
    # TODO: ask for what the recipe adds, and see the test fail without it.
    assert_trained(shell.folder / "snapshot.pt", 2, 64)
'''


def insert_after(file, text, line):
    """Inserts a line after the last one of a file that has a text."""
    before, _, after = (ROOT / file).read_text().rpartition(text)
    rest, _, after = after.partition("\n")
    (ROOT / file).write_text(f"{before}{text}{rest}\n{line}\n{after}")


def main():
    bases = sorted({step.base for step in ALL if step.file.startswith("recipes/")})
    name, base = [*sys.argv[1:], "", ""][:2]
    file = f"recipes/{name}.py"
    if not name.isidentifier() or base not in bases or (ROOT / file).exists():
        sys.exit(f"recipe: give a new NAME=clip, and as BASE one of these: {', '.join(bases)}")
    text = (ROOT / base).read_text().replace('"""Train', f'"""{name.capitalize()}: train', 1)
    first, _, rest = text.replace(f" {base} 50 10", f" {file} 50 10").partition("\n")
    if len(first) > MAX_LENGTH:
        first = '"""TODO: what it does, and how one starts it, in a line:'
    (ROOT / file).write_text(f"{first}\n{rest}")
    (ROOT / f"docs/recipes/{name}.md").write_text(PAGE.replace("NAME", name))
    (ROOT / f"tests/recipes/test_{name}.py").write_text(TEST.replace("NAME", name))
    step = f'    Step("{base}", "{file}", {changed_lines(base, file)}),'
    insert_after("tools/steps.py", f'"{base}", "recipes/', step)
    insert_after("mkdocs.yml", "  - recipes/", f"      - recipes/{name}.md")
    print("What you must write is marked TODO: make docs names it, and make lint in the test.")


if __name__ == "__main__":
    main()
