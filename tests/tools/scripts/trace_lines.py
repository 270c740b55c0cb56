"""The lines of the script that a rank runs, into a file."""

import atexit
import os
import sys
import threading

from patched import script

lines = set()


def trace(frame, event, arg):
    if frame.f_code.co_filename == script.__file__:
        lines.add(frame.f_lineno)
        return trace


sys.settrace(trace)
threading.settrace(trace)


@atexit.register
def write_lines():
    with open(f"lines.{os.environ['RANK']}", "w") as file:
        file.write(" ".join(map(str, lines)))
