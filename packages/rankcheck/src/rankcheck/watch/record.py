"""Runs a script under the recorder, and gathers what its ranks have done, line by line."""

import json
import os
import time

from rankcheck.launch.jobs import STARTUP, Shell, TimeLimit

SILENCE_S = 20  # after which a run hangs
MAX_WAIT_S = 120  # for the next line of the script, whatever is printed meanwhile


def ranks_of(files):
    """Returns the files of processes that have started none of the others."""
    parents = {path.stem.split("-")[0] for path in files}
    return [path for path in files if path.stem.split("-")[1] not in parents]


def events_of(folder, hanging=()):
    """Returns the events of each rank, for each attempt to train.

    Processes that hang, and not in a collective, wait for something else, and nobody comes.
    """
    attempts = {}
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_ctime_ns)
    for path in files:
        # The last line of a process that was killed may be half written.
        lines = [line for line in path.read_text().split("\n")[:-1] if line]
        events = [json.loads(line) for line in lines]
        if path not in ranks_of(files) and not any(event[1] for event in events):
            continue  # it has only started the ranks
        values = {name: value for event in reversed(events) for name, value in event[2].items()}
        attempt = attempts.setdefault(values.get("attempt", "0"), {})
        rank = int(values.get("rank", 0))
        # A call of several operations is one collective; of all ranks, unless it names them.
        kept = [event[: 4 if event[3] else 3] for event in events if not event[5]]
        if int(path.stem.split("-")[1]) in hanging and not kept[-1][1]:
            kept[-1] = [kept[-1][0], "a call that does not return", kept[-1][2], [rank, -1]]
        attempt[rank] = kept
    return [[ranks[rank] for rank in sorted(ranks)] for _, ranks in sorted(attempts.items())]


def record(command, script, folder, **more):
    """Runs a command that trains `script`; returns the events, and how it ended."""
    shell = Shell(folder)
    events = folder / "events"
    events.mkdir()
    variables = more | {
        "CUDA_VISIBLE_DEVICES": "",
        "WATCH_FOLDER": str(events),
        "WATCH_FILE": str(script),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")])),
    }
    job = shell.start(command, **variables)
    try:
        end = watch(job, events)
        alive = set(job.processes())
    finally:  # at Ctrl-C, too
        shell.end_all()
    return {"attempts": events_of(events, alive if end == "hangs" else ()), "end": end}, job.output


def watch(job, events):
    """Waits until a run ends, hangs or has written all that is recorded; returns which."""
    silence, wait = TimeLimit(SILENCE_S), TimeLimit(MAX_WAIT_S)
    while job.status() is None:
        time.sleep(0.05)
        files = [*events.glob("*.jsonl")]
        if files and all(path.with_suffix(".full").exists() for path in ranks_of(files)):
            return "limit"
        if silence.passed([*files, job.log]):
            return "hangs"
        if wait.passed(files):
            return "waits"
    return "fails" if job.status() else ""
