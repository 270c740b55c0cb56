"""Recomputes numbers that pages of docs/ quote

    python -m bench.pages published

Without names, it recomputes all, for half an hour on a machine that does nothing else. Each module
says in its first line which page quotes it.
"""

import argparse
import importlib
import os

NAMES = ["published", "memory_peaks", "recovery_time", "overlap", "cost"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, help="of what is timed; by default the page's")
    args = parser.parse_args()
    if unknown := {*args.names} - {*NAMES}:
        parser.error(f"nothing is called {', '.join(unknown)}: choose among {', '.join(NAMES)}")
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds must be 1 or more")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what the pages quote was measured on CPUs
    for name in args.names or NAMES:
        rounds = [] if args.rounds is None else [args.rounds]
        importlib.import_module(f"bench.pages.{name}").report(*rounds)


if __name__ == "__main__":
    main()
