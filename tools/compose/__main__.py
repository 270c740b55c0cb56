"""Composes one script from several files of the series, or from a script of yours and such files.

Each file adds its changes to the nearest file that it and those before it build on. With
--upgrade, a script of yours gets the changes made here since the version that you copied.
"""

import argparse
import contextlib
import sys
from pathlib import Path

from tools.compose.compose import (
    BASES,
    FILES,
    check_choice,
    compose,
    fail,
    find_problems,
    judge,
    name_of,
    pairs,
    upgrade,
)
from tools.judge import stages
from tools.steps import ROOT


def write_script(args, lines, source):
    """Writes the output, its lines ended as those of `source`; returns the lines of conflicts."""
    if args.output.exists() and not args.force:
        fail(f"{args.output} exists: name another one, or add --force")
    text = "\n".join(line for line, _ in lines) + "\n"
    windows = b"\r\n" in (ROOT / source).read_bytes()
    try:
        args.output.write_text(text, newline="\r\n" if windows else "\n")
    except OSError as error:
        fail(f"cannot write {args.output}: {error.strerror}")
    numbered = enumerate(text.splitlines(), 1)
    conflicts = [str(number) for number, line in numbered if line.startswith("<<<<<<< ")]
    if conflicts:
        return conflicts
    try:
        compile(text, args.output, "exec")  # ast.parse takes a keyword argument twice
    except SyntaxError as error:
        sys.exit(f"{args.output}, line {error.lineno}: {error.msg}: the parts do not fit there")
    return []


def sides_of_conflicts(lines):
    """Returns the script with the first side of each conflict, and with the second one."""
    sides = [], []
    chosen = sides
    for text, file in lines:
        if text.startswith("<<<<<<< "):
            chosen = sides[:1]
        elif text.startswith("||||||| "):
            chosen = []
        elif text == "=======" and not chosen:
            chosen = sides[1:]
        elif text.startswith(">>>>>>> "):
            chosen = sides
        else:
            for side in chosen:
                side.append((text, file))
    return sides


def tell_problems(args, parts, lines, conflicts):
    """Ends with a line on each, if there are any; of a conflict, both sides are looked at."""
    said = []
    if conflicts:
        said = [f"has conflicts, marked as git marks them, in lines: {', '.join(conflicts)}"]
    for side in sides_of_conflicts(lines) if conflicts else [lines]:
        with contextlib.suppress(SyntaxError):  # of a side that is no script by itself
            found = [*find_problems(parts, side)]
            if conflicts:  # a side has other line numbers than what is written
                found = [problem for problem in found if not problem.startswith("line ")]
            said += found
    if said:
        sys.exit("\n".join(f"{args.output}: {problem}" for problem in dict.fromkeys(said)))


def check_files(args, own, parts):
    """Ends with a line if a name is none of the series, or no file."""
    if args.base not in [None, *FILES]:
        fail(f"--base {args.base} is not of the series")
    if args.base and own in FILES:
        fail(f"{own} belongs to the series: --base is for a script of yours, named first")
    for part in parts if args.base else [own, *parts]:
        if part not in FILES:
            alike = [file for file in FILES if Path(file).stem == Path(part).stem]
            hint = "if it is yours, name it first, and add --base multinode.py or the like"
            if alike:
                hint = f"do you mean {alike[0]}?"
            fail(f"{part} is not of the series: {hint}")
    if not (ROOT / own).is_file():
        fail(f"there is no file {own}")
    if args.output and (name_of(args.output) in [own, *FILES] or args.output.is_dir()):
        fail(f"{args.output} is a folder, or one of the files: name another output")


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.compose", description=__doc__)
    parser.add_argument("parts", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("-o", "--output", type=Path, help="the script to write")
    parser.add_argument("--base", help="the file that yours, named first, was copied from")
    parser.add_argument("--upgrade", action="store_true", help="with --base multinode.py@VERSION")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    parser.add_argument("--check", action="store_true", help="judge the script as make check does")
    args = parser.parse_args()
    own, *parts = [name_of(part) for part in args.parts]
    old = args.base if args.upgrade else None
    if old:
        args.base = old.partition("@")[0]
    check_files(args, own, parts)
    if args.upgrade:
        if parts or "@" not in (old or "") or args.check:
            fail("--upgrade takes one script of yours, and --base multinode.py@VERSION")
        args.output = args.output or args.parts[0].with_stem(f"{args.parts[0].stem}_upgraded")
        lines = upgrade(own, args.base, old)
        conflicts = write_script(args, lines, own)
        print(f"{args.output}: {len(lines)} lines, of {own} and {args.base}")
        tell_problems(args, [own, args.base], lines, conflicts)
        return
    if args.base:
        BASES[own] = args.base
        parts = [own, *sorted(parts, key=FILES.index)]
    else:
        parts = sorted([own, *parts], key=FILES.index)
    if len(parts) < 2:
        fail("name two files or more")
    check_choice(parts)
    unknown = [part for part in parts if part.removesuffix(".py") not in stages.STAGES]
    if args.check and unknown:
        fail(f"make check cannot judge {unknown[0]}: leave out --check")
    if not args.output:
        fail("name the script to write: -o my_training.py")
    lines = compose(parts, str(args.output))
    conflicts = write_script(args, lines, parts[0])
    print(f"{args.output}: {len(lines)} lines, of {', '.join(parts)}")
    for (part, other), known in pairs(parts).items():
        print(f"  {known or 'not tried'}: {part} + {other}")
    tell_problems(args, parts, lines, conflicts)
    if args.check and judge(parts, args.output):
        sys.exit(1)


if __name__ == "__main__":
    main()
