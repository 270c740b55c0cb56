"""Carries an uncommitted edit of one file to all files that build on it: cascade.py singlegpu.py

A three-way merge for each file of the chain, as tools.compose merges: its text, and the file above
it as committed and as edited. Lines that both add at one place are all kept. A conflict is left in
the file, marked as git marks it, and the chain stops there; the files that do not build on that one
get the edit. Once none is left, what quotes the edited lines follows, or is named: see quotes.py.
"""

import sys

from tools.chain.quotes import carry, has_conflict
from tools.compose.compose import git
from tools.compose.merge import merge as merge_lines
from tools.steps import ALL, ROOT, STEPS, sizes


def merge(base, file):
    """Merges the uncommitted edit of `base` into `file`; returns whether it went in cleanly."""
    committed = git("show", f"HEAD:{base}")
    if not committed:
        sys.exit(f"cascade: {base} is not committed yet, so there is no edit to carry down")
    texts = [committed, (ROOT / file).read_text(), (ROOT / base).read_text()]
    old, ours, theirs = ([(line, None) for line in text.split("\n")] for text in texts)

    def mark(old, ours, theirs):
        start, end = (f"<<<<<<< {file}", None), (f">>>>>>> {base} as edited", None)
        before = (f"||||||| {base} as committed", None)
        return [start, *ours, before, *old, ("=======", None), *theirs, end]

    merged = merge_lines(old, ours, theirs, mark)
    (ROOT / file).write_text("\n".join(line for line, _ in merged))
    return not has_conflict(file)


def cascade(base):
    """Carries the edit of `base` down; returns what is to be done by hand."""
    problems = []
    for step in ALL:
        if step.base != base:
            continue
        if has_conflict(step.file):
            problems.append(f"{step.file} still has conflict marks: resolve them first")
        elif merge(base, step.file):
            problems += cascade(step.file)
        else:
            is_base = any(other.base == step.file for other in ALL)
            then = f"make cascade FROM={step.file}" if is_base else "make cascade"
            problems.append(f"conflict in {step.file}: resolve the marked lines, then run: {then}")
    return problems


def main():
    bases = sorted({step.base for step in ALL})
    edited = sys.argv[1:]
    if not {*edited} <= {*bases} or len(edited) > 1:
        example = f"make cascade FROM={STEPS[0].base}"
        sys.exit(f"cascade: name the edited file, as in: {example}\n  {', '.join(bases)}")
    marked = [step.file for step in ALL if has_conflict(step.file)]
    for file in edited or marked:
        if file in marked:
            sys.exit(f"cascade: {file} has conflict marks: resolve them first")
    print("before:", *sizes(), sep="\n  ")
    problems = [problem for base in edited for problem in cascade(base)]
    if not any(has_conflict(step.file) for step in ALL):
        problems += carry()
    print("after:", *sizes(), sep="\n  ")
    if problems:
        sys.exit("\n".join(f"cascade: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
