"""Writes down what a process of a training does, line by line.

The lines are those of the script WATCH_FILE. What is computed stays the same, bit for bit.
"""

import ast
import atexit
import contextlib
import inspect
import os
import sys
import threading

from rankcheck.watch import collectives, events, values

LEFT_OUT = ("parse_args", "forward", "__getitem__", "__len__")
script = os.environ["WATCH_FILE"]


def top_lines():
    """Returns the lines at the top of the script, if its loop is there; definitions are none."""
    with open(script) as source:
        nodes = ast.parse(source.read()).body
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in nodes if not isinstance(node, definitions)]
    if not any(isinstance(part, ast.For | ast.While) for n in nodes for part in ast.walk(n)):
        return set()
    return {number for n in nodes for number in range(n.lineno, n.end_lineno + 1)}


TOP_LINES = top_lines()


def trace(frame, event, argument):
    code = frame.f_code
    if code.co_filename != script or code.co_name in LEFT_OUT:
        return None
    is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
    if not is_function and not (code.co_name == "<module>" and TOP_LINES):
        return None

    def trace_line(frame, event, argument):
        if event == "line" and (is_function or frame.f_lineno in TOP_LINES):
            thread = threading.get_ident()
            events.lines[thread] = frame.f_lineno
            if thread == events.thread:
                with contextlib.suppress(Exception):  # what has no value now, or is another thing
                    values.note_values(frame)
                events.write()
        return trace_line

    return trace_line


class Output:
    """Standard output, of which each line is noted."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        if text.strip():
            events.changed["log"] = events.changed.get("log", "") + text.strip("\r\n") + "\n"
        return self.stream.write(text)


def install():
    values.install()
    collectives.install()
    sys.stdout = Output(sys.stdout)
    os.register_at_fork(after_in_child=lambda: sys.settrace(None))  # a data worker
    atexit.register(lambda: events.changed and events.write())  # what the last line has printed
    threading.settrace(trace)
    sys.settrace(trace)
