"""Runs a PyTorch training script on CPU processes, and says in which line it is wrong.

It starts the script several times, kills it and starts it again; "cuda" means the CPU. The script
finds the files of the folder in which one stands, but for snapshots, and writes into a copy.
"""

import argparse
import contextlib
import importlib.metadata
import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import rankcheck
from rankcheck import report, rules
from rankcheck.launch.scripts import path_of_module

USAGE = 64  # the status of a wrong command, as of other tools
COMMANDS = """
other commands:
  rankcheck explain RC201     what a rule means, and how to mend it (--script: the smallest example)
  rankcheck rules             all rules
  rankcheck watch train.py    a page that shows which lines each rank runs

exit status: 0 nothing found; 1 found; 2 the script could not be run; 3 too little was seen to
judge, or rankcheck itself failed; 64 a wrong command"""


class InterruptError(BaseException):
    """A signal that ends the command: what is known is told."""


class Parser(argparse.ArgumentParser):
    def error(self, message):
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(USAGE)


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


def make_parser():
    parser = Parser(
        prog="rankcheck",
        usage="%(prog)s [options] (train.py | -m package.train) [the script's own arguments]",
        description=__doc__,
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("script", nargs="?", type=Path, help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="as in python -m")
    add("--ranks", type=positive, default=2)
    add("--nodes", type=positive, default=1, help="nodes with a shared disk")
    add("--launcher", choices=["python", "torchrun"], help="how to start it")
    add("--steps", type=positive, default=200, help="steps after which a run ends (200)")
    add("--seconds", type=positive, default=60, help="seconds after its first step (60)")
    add("--no-kill", action="store_true", help="no kill, no SIGTERM, and no restart")
    add("--every-kill", action="store_true", help="kill at each file event of a save, not at three")
    more = {"type": positive, "action": "append", "default": []}
    add("--resume-ranks", **more, metavar="N", help="also start it again on so many ranks")
    add("--no-replay", action="store_true", help="no comparison with one process")
    add("--resume", default="", metavar="ARGUMENTS", help="more arguments, to start it again")
    add("--data", action="append", default=[], type=Path, metavar="PATH", help=DATA_HELP)
    add("--empty", action="store_true", help="start in an empty folder, with --data alone")
    add("--ignore", action="append", default=[], metavar="RULE", help="do not report RC803")
    add("--fail-on", choices=report.LEVELS, default="error", help="what makes the status 1 (error)")
    add("--format", choices=report.FORMATS, default="text")
    add("--keep", type=Path, metavar="FOLDER", help="keep all runs, and how they were started")
    add("-v", "--verbose", action="store_true", help="also what is right, and what was not seen")
    add("--version", action="version", version=version())
    return parser


DATA_HELP = "a file or folder that the script is to find, such as a snapshot"


def version():
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"rankcheck {rankcheck.__version__}, torch {importlib.metadata.version('torch')}"
    return f"rankcheck {rankcheck.__version__}, without torch"


def parse_args(arguments=None):
    """Returns the arguments; `root` is the folder in which one stands."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.root = Path.cwd()
    if args.module is not None:
        if not args.module:
            parser.error("-m needs the name of a module")
        args.module, *args.arguments = args.module
        args.script = path_of_module(args.module)
        if not args.script:
            parser.error(f"there is no module {args.module} here, or in the installed packages")
    elif not args.script:
        parser.error("name a script, as in: rankcheck train.py (--help shows the options)")
    elif not args.script.is_file():
        parser.error(f"there is no file {args.script}")
    if args.ranks % args.nodes or args.steps < 2:
        parser.error("--ranks must be a multiple of --nodes, and --steps 2 or more")
    for path in args.data:
        if not path.exists():
            parser.error(f"--data {path}: there is no such file or folder")
    unknown = report.names(" ".join(args.ignore)) - rules.load().keys()
    if unknown:
        parser.error(f"--ignore {', '.join(unknown)}: no such rule (rankcheck rules lists them)")
    args.script = args.script.resolve()
    return args


def interrupt(signum, frame):
    raise InterruptError(signal.Signals(signum).name)


@contextlib.contextmanager
def folder_of_runs(keep):
    """Yields the folder for all runs, which is kept if it has a name."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise FileExistsError(f"--keep {keep}: the folder is not empty")
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def examine(args):
    """Runs the script; returns the findings, and whether enough was seen to judge."""
    from rankcheck.auditor import Audit  # imports torch, for which a wrong command need not wait

    with folder_of_runs(args.keep) as folder:
        audit = Audit(args, folder)
        print(audit.introduction(), file=sys.stderr)
        try:
            audit.ask()
        except (InterruptError, KeyboardInterrupt) as error:
            audit.interrupted(str(error) or "SIGINT")
        finally:
            audit.end()
        return report.kept(audit.findings, report.names(" ".join(args.ignore))), audit.judged


def explain(arguments):
    parser = Parser(prog="rankcheck explain")
    parser.add_argument("rule")
    parser.add_argument("--script", action="store_true", help="the smallest script that has it")
    args = parser.parse_args(arguments)
    rule = rules.load().get(args.rule.upper())
    if not rule:
        parser.error(f"there is no rule {args.rule} (rankcheck rules lists them)")
    print(rules.example(rule) if args.script else rule.text, end="")


def list_rules():
    for rule in rules.load().values():
        print(f"{rule.id}  {rule.title}")


def watch(arguments):
    from rankcheck.watch import page

    page.main(arguments)


def main():
    command, rest = sys.argv[1:2], sys.argv[2:]
    if command == ["explain"]:
        return explain(rest)
    if command == ["rules"]:
        return list_rules()
    if not sys.platform.startswith("linux"):
        sys.exit("rankcheck needs Linux, since it forks ranks and reads /proc: use a container")
    if command == ["watch"]:
        return watch(rest)
    args = parse_args()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, interrupt)
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # of data workers that are killed
    try:
        findings, judged = examine(args)
    except rankcheck.CannotRunError as error:
        print(f"It could not be run:\n{textwrap.indent(str(error), '| ')}", file=sys.stderr)
        sys.exit(2)
    except InterruptError as error:
        print(f"rankcheck: {error} ended it before its first run", file=sys.stderr)
        sys.exit(3)
    except OSError as error:  # of --keep
        make_parser().error(str(error))
    print(report.FORMATS[args.format](findings, args.script, args.verbose))
    levels = report.LEVELS[: report.LEVELS.index(args.fail_on) + 1]
    found = any(finding.level in levels for finding in findings)
    sys.exit(1 if found else 0 if judged else 3)
