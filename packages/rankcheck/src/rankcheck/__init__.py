"""Runs a training script on CPU processes, and says in which line it is wrong: see README.md."""

__version__ = "0.1.0"
