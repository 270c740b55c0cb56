"""What a reader's script says of how it is started, and how our tools are ended."""

import re
import signal
import sys


def imported(path, script):
    """Yields the files that a file of a script's imports, if they lie beside it or above."""
    for dots, name in re.findall(r"^\s*(?:from|import) +(\.*)([\w.]*)", path.read_text(), re.M):
        above = path.parents[len(dots) - 1 : len(dots)]
        for folder in above if dots else script.parents[:2]:
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
    starts_ranks = re.search(r"(?<!psutil\.)\b(spawn|start_processes|Process)\(", text)
    reads_rank = r"(\[|get\(|getenv\().((LOCAL_)?RANK|WORLD_SIZE).[],)]"
    joins = rf"{reads_rank}|init_process_group|\b(Accelerator|Fabric)\("
    if starts_ranks or not re.search(joins, text):
        return "python"
    return "torchrun"


def end(signum, frame):
    """Ends this process as Ctrl-C does, so that it ends what it has started."""
    sys.exit(f"ended by {signal.Signals(signum).name}")


def end_at_signals():
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, end)
