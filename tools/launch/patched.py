"""Changes scripts without an edit of their source."""

import inspect
from pathlib import Path

from tools.steps import ROOT


def before(owner, name, at_end=False):
    """Decorates what `owner.name` is to call first, or at its end, with its own arguments."""

    def decorate(function):
        original = getattr(owner, name)

        def call_both(*args, **options):
            if not at_end:
                function(*args, **options)
            result = original(*args, **options)
            if at_end:
                function(*args, **options)
            return result

        setattr(owner, name, call_both)

    return decorate


def after(owner, name):
    """Decorates what `owner.name` is to call at its end, with its own arguments."""
    return before(owner, name, at_end=True)


def patch(folder, script, setup="", name=""):
    """Writes a script that runs `script` after `setup`, Python code that changes it.

    In `setup`, the module of the script is called `script`, and its main has not run yet; `before`
    and `after` are there as well; a file with such code imports them from `patched`. The ranks of
    multigpu.py, too, can then be started as others are, one by one. Returns the path.
    """
    rank = 'int(os.environ.pop("LOCAL_RANK")), ' if script == "multigpu.py" else ""
    path = folder / (name or Path(script).name)
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"""
import functools, importlib.util, os, sys, time, types
import torch
from torch import nn
{inspect.getsource(before)}
{inspect.getsource(after)}
spec = importlib.util.spec_from_file_location("script", {str(ROOT / script)!r})
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)
sys.modules["patched"] = types.SimpleNamespace(after=after, before=before, script=script)
{setup}
if __name__ == "__main__":
    script.main({rank}script.parse_args())
""")
    new.replace(path)  # a job may read the old one; and it may be a link to the script itself
    return path
