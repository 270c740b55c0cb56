"""Runs a training script on CPU processes, and says in which line it is wrong: see README.md."""

__version__ = "0.1.0"


class CannotRunError(Exception):
    """The script makes no step: its text is what it has printed."""


def audit(script, arguments=(), options=()):
    """Returns the findings of a script, for a test of one's own; see Finding in questions/facts.py.

    `options` are those of the command, such as ["--ranks", "4"]. Raises CannotRunError.
    """
    from rankcheck.cli import examine, parse_args

    findings, _ = examine(parse_args([*map(str, options), str(script), *map(str, arguments)]))
    return findings
