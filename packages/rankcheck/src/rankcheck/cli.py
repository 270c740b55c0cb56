"""Runs a training script and says what is wrong with it: rankcheck my_train.py 3 1

It starts the script several times, in empty folders, on CPU processes ("cuda" means the CPU), and
ends it after some steps. Paths to data must therefore be absolute, and a script that needs the
network, or CUDA kernels of its own, cannot be run. docs/audit.md explains each question.
"""

import argparse
import os
import re
import sys
import tempfile
import textwrap
from pathlib import Path

from rankcheck.launch.scripts import end_at_signals

TITLES = {"error": "WRONG", "warning": "look at", "ok": "ok", "unseen": "not seen"}


def grouped(findings):
    """Returns the findings, each once: those that differ in numbers and names alone are counted."""
    groups = {}
    for finding in findings:
        form = re.sub(r"[^\s:,;]*[\d.][^\s:,;]*", "#", finding.text)
        groups.setdefault((finding.level, form, finding.rule), []).append(finding)
    for first, *others in groups.values():
        places = dict.fromkeys(other.place for other in others if other.place != first.place)
        file = first.place.rpartition(":")[0]
        lines = [place.removeprefix(f"{file}:").rpartition("/")[2] for place in places]
        also = f" (also at {', '.join(lines)})" if places else ""
        more = f" (and {len(others)} more of this kind)" if others and not places else ""
        yield first._replace(text=f"{first.text}{also}{more}")


def report(findings, script):
    findings = list(grouped(findings))
    for level, title in TITLES.items():
        for rule, place, text in (finding[1:] for finding in findings if finding.level == level):
            file, _, line = place.rpartition(":")
            beside = Path(file).is_relative_to(script.parent)
            name = os.path.relpath(file, script.parent if beside else None) if file else ""
            text = f"{name}:{line}: {text}" if place else text
            rule = f" ({rule})" if rule else ""
            indent = {"initial_indent": f"{title:10}", "subsequent_indent": " " * 10}
            print(textwrap.fill(text + rule, 98, break_long_words=False, **indent))


def parse_args(arguments=None):
    parser = argparse.ArgumentParser(prog="rankcheck", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="nodes with a shared disk")
    parser.add_argument("--launcher", choices=["python", "torchrun"], help="how to start it")
    parser.add_argument("--steps", type=int, default=200, help="steps after which a run ends")
    parser.add_argument("--seconds", type=int, default=60, help="seconds after which it ends")
    parser.add_argument("--no-kill", action="store_true", help="skip kill and resume")
    parser.add_argument("--resume", default="", metavar="ARGUMENTS", help="needed to resume")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    args = parser.parse_args(arguments)
    if not args.script.is_file():
        parser.error(f"there is no file {args.script}")
    if min(args.nodes, args.ranks, args.seconds) < 1 or args.ranks % args.nodes or args.steps < 2:
        parser.error("--ranks must be a multiple of --nodes, --steps 2 or more, --seconds 1")
    args.script = args.script.resolve()
    return args


def main():
    if sys.argv[1:2] == ["watch"]:
        from rankcheck.watch import page

        sys.exit(page.main(sys.argv[2:]))
    args = parse_args()
    # This imports torch, for which a typing mistake need not wait.
    from rankcheck.auditor import Audit, CannotRunError

    end_at_signals()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of data workers that are killed
    with tempfile.TemporaryDirectory() as folder:
        audit = Audit(args, Path(folder))
        print(f"{args.script.name}, started as by {audit.launcher}, in an empty folder, on CPUs")
        try:
            findings = audit.ask()
        except CannotRunError as error:
            print(f"It could not be run:\n{textwrap.indent(str(error), '| ')}", file=sys.stderr)
            sys.exit(2)
        finally:
            audit.shell.end_all()
    report(findings, args.script)
    sys.exit(any(finding.level == "error" for finding in findings))


if __name__ == "__main__":
    main()
