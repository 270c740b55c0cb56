"""Kills a script at every point of a small run, and starts it again: every_kill resumable.py

A point lies before and after each operation on a file, each collective and each step. There, one of
two ranks gets SIGKILL, and the other what torchrun sends it; or both get SIGKILL; or the power
fails; or, if the script stops at a signal, both get SIGTERM, once or twice. The next life must not
resume from before the last snapshot that the log has named (after a power cut, the last but one),
and must end as an undisturbed run: with the same files, weights and optimizer, bit for bit.
"""

import argparse
import collections
import contextlib
import fnmatch
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tools.launch.jobs import Ranks
from tools.launch.snapshots import load_gpt, logged_positions, make_model, write_chats, write_text
from tools.steps import ROOT

LIFE_S = 120  # in which a life ends, of a second where the machine is not busy
MANY_WRITES = 300  # into files of one name: more than the three snapshots of the toy take
JOBS = 2
SCRIPT = """
import importlib.util, sys
sys.path.insert(0, {root!r})
spec = importlib.util.spec_from_file_location("script", {script!r})
script = importlib.util.module_from_spec(spec)
sys.modules["script"] = script
spec.loader.exec_module(script)
if hasattr(script, "ToyDataset"):
    ToyDataset = script.ToyDataset
    script.ToyDataset = lambda _: ToyDataset(24)
# The ranks ask after each step whether to stop, however long the steps take.
script.Trainer.next_check = property(lambda self: self.steps, lambda self, step: None)
from tools.chain import kill_points
kill_points.install(script)
script.main(script.parse_args())
"""
# Two epochs of three steps. They save after the first, within the second, and after it.
STEPS = "2 1 --save_every_steps 4"
TOY = f"{STEPS} --batch_size 4"
ELASTIC = f"{STEPS} --global_batch_size 8"
TEXT = f"{TOY} --text ../text --val_tokens"
GPT = f"{TEXT} 64 --n_layer 1 --n_head 1 --n_embd 8 --context 8 --generate 0"
OPTIONS = {
    "resumable.py": TOY,
    "preemptible.py": TOY,
    "elastic_ddp.py": ELASTIC,
    "recipes/own_disks.py": ELASTIC,
    "recipes/save_after_failure.py": ELASTIC,
    "gpt/dcp.py": GPT,
    "gpt/fsdp.py": GPT,
    "gpt/async_save.py": GPT,
    "gpt/finetune_chat.py": f"{TEXT} 320 --context 40 --model ../model --export_path exported",
}
SIGKILLS = ("rank", "all")
SIGTERMS = ("sigterm", "sigterm_twice")
STOPPED = ("preemptible.py", "elastic_ddp.py")  # by these
FOLDER = r"epoch_\d+_sample_\d+"  # a snapshot of gpt/


class Life(NamedTuple):
    """What the ranks of a life have done, and the files of the nodes at its end."""

    status: int | None  # None: it hangs
    output: str
    files: dict  # what each holds, by its path; None stands for a folder
    points: list  # the rank, a name, its n-th time, and more

    def start(self):
        """Returns the position of the first batch; at the very end, there is none."""
        return next((more for _, name, _, more in self.points if name == "batch"), (math.inf,))

    def steps(self):
        return sum((rank, name) == (0, "step") for rank, name, *_ in self.points)


def promised(output, lost=0):
    """Returns the position of the last snapshot that a log has named, but for `lost` ones."""
    lost += "| saving" in output  # which is complete once the next one is named
    return max([(0, 0), *logged_positions(output)[: -lost or None]])


class Run:
    """A folder for one life after another; of `kills`, each happens once."""

    def __init__(self, folder, file, kills=(), **variables):
        self.folder = Path(folder)
        self.control = self.folder / "control"
        self.control.mkdir()
        self.variables = variables | {"KILLS": json.dumps(kills), "KILL_FOLDER": str(self.control)}
        # Each node of own_disks.py has a disk of its own.
        self.nodes = [self.folder / f"node{n * ('own_disks' in file)}" for n in range(2)]
        script = self.folder / Path(file).name
        script.write_text(SCRIPT.format(root=str(ROOT), script=os.path.join(ROOT, file)))
        options = next(OPTIONS[name] for name in OPTIONS if Path(name).name == script.name)
        self.command = f"{script} {options}"
        write_text(self.folder / "text", 24 + 8, 8)
        if "--model" in options:
            make_model(self.folder / "model", "Llama")
            write_chats(self.folder / "text", 24 + 8)

    def fired(self):
        return len(list(self.control.glob("*.fired")))

    def live(self):
        for path in [*self.control.glob("*.pid"), *self.control.glob("points")]:
            path.unlink()
        job = Ranks(self.command, self.nodes, self.variables, ())
        end = time.monotonic() + LIFE_S
        while job.status() is None and time.monotonic() < end:
            time.sleep(0.005)
        status, output = job.status(), job.output
        job.end()
        job.log.unlink()
        points = []
        with contextlib.suppress(OSError, EOFError), open(self.control / "points", "rb") as file:
            while True:
                points.append(pickle.load(file))
        return Life(status, output, self.files(), points)

    def live_unless_known(self, lives):
        """Returns the life that starts from the files as they are: it knows of nothing else."""
        path = lives / hashlib.sha256(repr(self.files()).encode()).hexdigest()
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(self.live()))
            part.rename(path)
        return pickle.loads(path.read_bytes())

    def files(self):
        paths = sorted(path for node in set(self.nodes) for path in node.rglob("*"))
        contents = [None if path.is_dir() else path.read_bytes() for path in paths]
        names = [str(path.relative_to(self.folder)) for path in paths]
        return dict(zip(names, contents, strict=True))


def write_files(folder, files):
    for name, content in sorted(files.items()):
        path = Path(folder, name)
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def snapshots(files):
    """Returns the snapshot of each node."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(folder, files)
        return {path.parent.name: load_gpt(path) for path in Path(folder).glob("node?/snapshot*")}


def equal(one, other, name=""):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k], k) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if name == "loss":  # a resumed run adds the same numbers in another order
        return math.isclose(one, other, rel_tol=1e-5)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def names_of(files):
    """Returns the files' names; of all folders with a snapshot, only the last has the same one.

    A life counts its steps from where it resumes, so it may save at others.
    """
    last = max(re.findall(FOLDER, " ".join(files)), default="")
    return sorted(re.sub(f"(?!{last}){FOLDER}", "earlier", name) for name in files)


def difference(files, expected):
    """Returns in what the end of a run differs from the undisturbed run's, or ""."""
    names, expected_names = names_of(files), names_of(expected)
    if names != expected_names:
        return f"it leaves {names}, not {expected_names}"
    if any(files[name] != expected[name] for name in names if "/snapshot" not in name):
        return "what it exports is not the same"
    if files != expected and not equal(snapshots(files), snapshots(expected)):
        return "its weights, optimizer or position are not the same"
    return ""


def after_power_cut(points, renames_are_lost):
    """Returns the files that a power cut leaves: what was not synced is gone.

    No script syncs a folder: the last renames may be gone as well. The next sync on the same disk
    commits them, since file systems with a journal, such as ext4 and XFS, keep the order.
    """
    names, synced, on_disk = {}, {}, {}
    for number, (_, name, _, more) in enumerate(points):
        operation = name.partition(" ")[0]
        if operation == "open":
            synced[names.setdefault(more[0], number)] = b""
        elif operation == "mkdir":
            names[more[0]] = None
        elif operation == "rename":
            names[more[1]] = names.pop(more[0])
        elif operation in ("remove", "rmdir"):
            names.pop(more[0], None)
        elif operation == "fsync":
            synced[names[more[0]]] = more[1]
            node = more[0].partition("/")[0]
            others = {path: file for path, file in on_disk.items() if not path.startswith(node)}
            on_disk = others | {path: names[path] for path in names if path.startswith(node)}
    left = on_disk if renames_are_lost else names
    return {path: synced.get(file) for path, file in left.items()}


def power_cuts(points):
    """Returns a trial for each power cut that leaves other files, or has promised more."""
    found = {}
    for end, (rank, name, count, _) in enumerate(points):
        log = "".join(more[0] for _, name, _, more in points[:end] if name == "log")
        for mode in ("power", "power_and_renames"):
            files = after_power_cut(points[:end], mode == "power_and_renames")
            trial = ([], files, promised(log, lost=1))
            found[repr(trial)] = (f"{mode}:{rank}:{name}:{count}", trial)
    return dict(found.values())


def kills(file, points, rng):
    """Returns a trial for each way to kill at each point; of many writes into a file, at some."""
    modes = SIGKILLS + SIGTERMS * (Path(file).name in STOPPED)
    times = collections.Counter(point[:2] for point in points)
    many = {key: n for key, n in times.items() if key[1].startswith("write") and n > MANY_WRITES}
    some = {key: rng.sample(range(1, n + 1), 20) for key, n in many.items()}
    kept = [point for point in points if point[2] in some.get(point[:2], [point[2]])]
    return trials([[(mode, *point)] for mode in modes for point in kept])


def pairs(points, number, rng):
    ranks = [[("rank", *point) for point in points if point[0] == rank] for rank in (0, 1)]
    return trials([[rng.choice(ranks[0]), rng.choice(ranks[1])] for _ in range(number)])


def trials(runs):
    """Returns what `try_kills` takes, by a name."""
    return {"+".join(":".join(map(str, k)) for k in kills): (kills, {}, (0, 0)) for kills in runs}


def try_kills(trial, file, expected, lives):
    """Returns what is wrong after some kills, each in one life, or "", or None: a kill was missed.

    The first life finds `files`, and must not start from before what was `promise`d.
    """
    kills, files, promise = trial
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, file, kills)
        write_files(folder, files)
        steps, fired = 0, 0
        while True:
            before = fired
            life = run.live() if fired < len(kills) else run.live_unless_known(lives)
            fired = run.fired()
            steps += life.steps()
            if life.status is None:
                return f"it hangs: {life.output}"
            if life.start() < promise:
                return f"it resumes from {life.start()}, and the log has named {promise}"
            if life.status == 0:
                break
            if fired == before:
                return f"it does not resume: {life.output}"
            promise = max(promise, promised(life.output))
        if kills and fired == 0:
            return None
        if kills and kills[0][0] in SIGTERMS and steps != expected.steps():
            return f"it trains {steps} steps in all, not {expected.steps()}"
        return difference(life.files, expected.files)


def undisturbed(file, **variables):
    with tempfile.TemporaryDirectory() as folder:
        life = Run(folder, file, **variables).live()
    if life.status != 0:
        sys.exit(f"every_kill: {file} fails without a kill: {life.output}")
    return life


def check(file, args):
    """Prints each failure, and the command that tries it again; returns how many there are."""
    start, rng = time.monotonic(), random.Random(args.seed)
    expected = undisturbed(file, **{"KILL_LINES": "1"} if args.lines else {})
    points = [point[:3] for point in expected.points]
    if args.lines:
        points = [point for point in points if point[1].startswith("line ")]
    if args.pairs:
        found = pairs(points, args.pairs, rng)
    else:
        found = kills(file, points, rng)
        found |= power_cuts(undisturbed(file, KEEP_BUFFERS="1").points)
    names = fnmatch.filter(found, args.at)
    names = rng.sample(names, math.ceil(len(names) * args.share))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(JOBS, context) as pool, tempfile.TemporaryDirectory() as lives:
        more = (file, expected, Path(lives))
        tried = {name: pool.submit(try_kills, found[name], *more) for name in names}
        wrong = {name: future.result() for name, future in tried.items()}
    for name, what in wrong.items():
        if what:
            print(f"python -m tools.chain.every_kill {file} --at {name!r}\n  {what}")
    modes = collections.Counter(name.partition(":")[0] for name in names)
    counts = ", ".join(f"{count} {mode}" for mode, count in modes.items())
    bad, missed = sum(map(bool, wrong.values())), list(wrong.values()).count(None)
    minutes = (time.monotonic() - start) / 60
    print(f"{file}: {len(points)} points, runs: {counts}: {bad} bad, {missed} missed", end="")
    print(f" in {minutes:.1f} minutes", flush=True)
    return bad + (missed > len(names) / 20)


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.chain.every_kill", description=__doc__)
    parser.add_argument("files", nargs="*", default=list(OPTIONS), metavar="FILE")
    parser.add_argument("--at", default="*", help="only here: a failure as it was printed, or a pattern")
    parser.add_argument("--share", type=float, default=1, help="of the kills, at random")
    parser.add_argument("--pairs", type=int, help="kill both ranks so often, each at some point")
    parser.add_argument("--lines", action="store_true", help="a point is a line, not an operation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for file in args.files:
        if not any(Path(file).name == Path(name).name for name in OPTIONS):
            parser.error(f"{file} is none of {', '.join(OPTIONS)}")
    sys.exit(sum([check(file, args) for file in args.files]) > 0)


if __name__ == "__main__":
    main()
