"""What a reader's script says of how it is started, and how our tools are ended."""

import importlib.machinery
import os
import re
import signal
import sys
from pathlib import Path


def path_of_module(name):
    """Returns the file that `python -m name` would run here, or None; nothing is imported."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if not spec:
        return None
    places = spec.submodule_search_locations or ()
    if not rest and spec.origin and not places:
        return Path(spec.origin)
    for place in places:
        path = Path(place, *rest)
        files = [path.with_suffix(".py")] if rest else []
        for file in (*files, path / "__main__.py"):
            if file.is_file():
                return file
    return None


def imported(path, script):
    """Yields the files that a file of a script's imports, if they lie beside it or above."""
    for dots, name in re.findall(r"^\s*(?:from|import) +(\.*)([\w.]*)", path.read_text(), re.M):
        above = path.parents[len(dots) - 1 : len(dots)]
        named = [Path(folder) for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
        for folder in above if dots else [*script.parents[:2], *named]:
            module = folder.joinpath(*name.split("."))
            yield from (module.with_suffix(".py"), module / "__init__.py")


def sources(script):
    """Returns the text of a script and of the files beside it that it imports."""
    paths = [script]
    for path in paths:  # which grows
        paths += [p for p in imported(path, script) if p.is_file() and p not in paths]
    return "\n".join(path.read_text() for path in paths)


def launcher(text):
    """Returns what starts a script: torchrun, unless it starts its ranks itself or is alone."""
    starts_ranks = r"(?<!psutil\.)\b(spawn|start_processes|Process)\(|\bddp_(spawn|fork|notebook)"
    reads_rank = r"(\[|get\(|getenv\().((LOCAL_)?RANK|WORLD_SIZE).[],)]"
    joins = rf"{reads_rank}|init_process_group|init_device_mesh|fully_shard\("
    joins += r"|\b(Accelerator|Fabric)\(|TrainingArguments"
    joins += r"|(?m:^\s*(import|from) +(pytorch_)?lightning\b)"
    if re.search(starts_ranks, text) or not re.search(joins, text):
        return "python"
    return "torchrun"


def end(signum, frame):
    """Ends this process as Ctrl-C does, so that it ends what it has started."""
    sys.exit(f"ended by {signal.Signals(signum).name}")


def end_at_signals():
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
