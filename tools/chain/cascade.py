"""Carries an uncommitted edit of one file to all files that build on it: cascade.py singlegpu.py

A three-way merge for each file of the chain: its text, and the file above it as committed and as
edited. A conflict is left in the file, marked as git marks it, and the chain stops there; the
files that do not build on that one get the edit.
"""

import subprocess
import sys
import tempfile

from tools.steps import ALL, ROOT, STEPS, sizes


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, timeout=60)


def merge(base, file):
    """Merges the uncommitted edit of `base` into `file`; returns whether it went in cleanly."""
    committed = git("show", f"HEAD:{base}")
    if committed.returncode:
        sys.exit(f"cascade: {base} is not committed yet, so there is no edit to carry down")
    with tempfile.NamedTemporaryFile() as ancestor:
        ancestor.write(committed.stdout)
        ancestor.flush()
        labels = ["-L", file, "-L", f"{base} as committed", "-L", f"{base} as edited"]
        merged = git("merge-file", "-p", *labels, file, ancestor.name, base)
    # merge-file exits with the number of conflicts, or above 127 for an error.
    if merged.returncode > 127:
        sys.exit(f"cascade: {merged.stderr.decode().strip()}")
    (ROOT / file).write_bytes(merged.stdout)
    return merged.returncode == 0


def cascade(base):
    """Carries the edit of `base` down; returns what is to be done by hand."""
    problems = []
    for step in ALL:
        if step.base != base:
            continue
        if b"\n<<<<<<< " in (ROOT / step.file).read_bytes():
            problems.append(f"{step.file} still has conflict marks: resolve them first")
        elif merge(base, step.file):
            problems += cascade(step.file)
        else:
            problem = f"conflict in {step.file}: resolve the marked lines"
            if any(other.base == step.file for other in ALL):
                problem += f", then run: make cascade FROM={step.file}"
            problems.append(problem)
    return problems


def main():
    bases = sorted({step.base for step in ALL})
    if len(sys.argv) != 2 or sys.argv[1] not in bases:
        example = f"make cascade FROM={STEPS[0].base}"
        sys.exit(f"cascade: name the edited file, as in: {example}\n  {', '.join(bases)}")
    print("before:", *sizes(), sep="\n  ")
    problems = cascade(sys.argv[1])
    print("after:", *sizes(), sep="\n  ")
    if problems:
        sys.exit("\n".join(f"cascade: {problem}" for problem in problems))


if __name__ == "__main__":
    main()
