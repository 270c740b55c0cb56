"""Kills a script at every point of a small run, and starts it again: every_kill resumable.py

A point lies before and after each operation on a file, each collective and each step. There, one of
two ranks gets SIGKILL, and the other what torchrun sends it; or all get SIGKILL at once; or the
power fails; or, if the script stops at a signal, all get SIGTERM, once or twice. The next life must
not resume from before the last snapshot that the log has named, and must end as an undisturbed run:
with the same files, and in them the same weights and the same optimizer, bit for bit.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

from tools.launch.jobs import Ranks
from tools.launch.snapshots import load_gpt, logged_positions, make_model, write_chats, write_text
from tools.steps import ROOT

LIFE_S = 60  # that is, for ever: a life takes a second
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
STOPPED = ("preemptible.py", "elastic_ddp.py")  # by SIGTERM
SNAPSHOT = r"epoch_\d+_sample_\d+"
MODES = ("rank", "all", "power", "sigterm", "sigterm_twice")


class Life:
    """What the ranks of one life did: `points`, and how they ended."""

    def __init__(self, status, output, points):
        self.status = status  # None: they hang
        self.output = output
        self.points = points

    def start(self):
        """Returns the position of the first batch; at the very end, there is none."""
        return next((more for _, name, _, more in self.points if name == "batch"), (math.inf,))

    def steps(self):
        return sum((rank, name) == (0, "step") for rank, name, *_ in self.points)

    def promise(self, lost=0):
        """Returns the position of the last snapshot that the log has named, but for `lost` ones."""
        lost += "| saving" in self.output  # which is complete once the next one is named
        return max([(0, 0), *logged_positions(self.output)[: -lost or None]])


class Run:
    """A folder for one life after another; of `kills`, each happens once."""

    def __init__(self, file, kills=(), **variables):
        self.root = Path(tempfile.mkdtemp(prefix="every_kill-"))
        self.control = self.root / "control"
        self.control.mkdir()
        self.kills = kills
        self.variables = variables | {"KILLS": json.dumps(kills), "KILL_FOLDER": str(self.control)}
        # Each node of own_disks.py has a disk of its own.
        self.nodes = [self.root / node for node in ("node0", f"node{int('own_disks' in file)}")]
        script = self.root / Path(file).name
        script.write_text(SCRIPT.format(root=str(ROOT), script=os.path.join(ROOT, file)))
        options = next(OPTIONS[name] for name in OPTIONS if Path(name).name == script.name)
        self.command = f"{script} {options}"
        if "--model" in options:
            make_model(self.root / "model", "Llama")
            write_chats(self.root / "text", 24 + 8)
        else:
            write_text(self.root / "text", 24 + 8, 8)

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
        return Life(status, output, points)

    def files(self):
        """Returns what each file of the nodes holds, by its path; None stands for a folder."""
        paths = sorted(path for node in set(self.nodes) for path in node.rglob("*"))
        names = [str(path.relative_to(self.root)) for path in paths]
        contents = [None if path.is_dir() else path.read_bytes() for path in paths]
        return dict(zip(names, contents, strict=True))


def write_files(folder, files):
    for name, content in sorted(files.items()):
        path = Path(folder, name)
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def snapshots(files):
    """Returns the snapshots among some files, by name: each is a file, or a folder of them."""
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


def comparable_names(files):
    """Returns the names of files; a life that resumes counts its steps anew, and so saves elsewhere

    than another before it saves at the end.
    """
    last = max(re.findall(SNAPSHOT, " ".join(files)), default="")
    return sorted(re.sub(f"(?!{last}){SNAPSHOT}", "earlier", name) for name in files)


def difference(files, expected):
    """Returns in what the end of a run differs from the undisturbed run's, or ""."""
    names, expected_names = map(comparable_names, (files, expected))
    if names != expected_names:
        return f"files {names}, not {expected_names}"
    others = [name for name in names if "/snapshot" not in name and files[name] != expected[name]]
    if others:
        return f"other contents: {others}"
    if files != expected and not equal(snapshots(files), snapshots(expected)):
        return "other weights, optimizer or position"
    return ""


def after_power_cut(points, renames_are_lost):
    """Returns the files that a power cut leaves: what was not synced is gone.

    So are, in the worst case, the renames since the last sync: no script syncs its folder. The
    journal of a file system keeps their order.
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
            on_disk = names.copy()
    return {path: synced.get(file) for path, file in (on_disk if renames_are_lost else names).items()}


def undisturbed(file, **variables):
    """Returns a life that nothing ends, and its files."""
    run = Run(file, **variables)
    life = run.live()
    if life.status != 0:
        sys.exit(f"{file} fails without a kill: {life.output}")
    files = run.files()
    shutil.rmtree(run.root)
    return life, files


def last_life(run, expected, known):
    """Returns start and steps of the life that no kill ends, and what is wrong with it, or "".

    All that it knows of the lives before are files. If they are as after another kill, so is it.
    """
    path = known / hashlib.sha256(repr(run.files()).encode()).hexdigest()
    if not path.exists():
        life = run.live()
        wrong = "" if life.status == 0 else f"it does not resume: {life.output}"
        wrong = wrong or difference(run.files(), expected)
        path.write_text(json.dumps([life.start(), life.steps(), wrong]))
    return json.loads(path.read_text())


def try_kills(run, undisturbed_life, expected, known, promise=(0, 0)):
    """Returns what is wrong after the kills of a run, each in one life, or ""."""
    steps, fired = 0, 0
    while fired < len(run.kills):
        life = run.live()
        steps += life.steps()
        before, fired = fired, len(list(run.control.glob("fired*")))
        if life.status is None:
            return f"it hangs: {life.output}"
        if life.start() < promise:
            return f"it resumes from {life.start()}, and has logged {promise}"
        if fired == 0:
            return f"it did not come to this point again: {life.output}"
        if life.status == 0:  # it has ended before the second kill, or the signal came too late
            return difference(run.files(), expected)
        if fired == before:
            return f"it does not resume: {life.output}"
        promise = max(promise, life.promise())
    start, last_steps, wrong = last_life(run, expected, known)
    if tuple(start) < promise:
        return f"it resumes from {start}, and has logged {promise}"
    if run.kills and run.kills[0][0].startswith("sigterm"):
        if steps + last_steps != undisturbed_life.steps():
            return f"{steps} + {last_steps} steps, not {undisturbed_life.steps()}"
    return wrong


def power_cuts(points):
    """Returns the power cuts that leave different files, and the most that each has promised."""
    found = {}
    for end, (rank, name, count, _) in enumerate(points):
        log = "".join(more[0] for _, name, _, more in points[:end] if name == "log")
        promise = Life(0, log, []).promise(lost=1)
        for mode in ("power", "power_and_renames"):
            files = after_power_cut(points[:end], mode == "power_and_renames")
            found[repr((files, promise))] = ([mode, rank, name, count], files, promise)
    return found.values()


def trials(file, points, args):
    """Returns the kills to try, each with its mode: a list for each run."""
    rng = random.Random(args.seed)
    number = collections.Counter(point[:2] for point in points)
    kept = {key: set(rng.sample(range(1, n + 1), min(n, args.writes))) for key, n in number.items()}
    points = [p for p in points if not p[1].startswith("write") or p[2] in kept[p[:2]]]
    if args.lines:
        points = [point for point in points if point[1].startswith("line ")]
    if args.pairs:
        ranks = [[("rank", *point) for point in points if point[0] == rank] for rank in (0, 1)]
        return [[*map(rng.choice, ranks)] for _ in range(args.pairs)]
    modes = [mode for mode in args.modes if mode != "power"]
    if Path(file).name not in STOPPED:
        modes = [mode for mode in modes if not mode.startswith("sigterm")]
    return [[(mode, *point)] for mode in modes for point in points]


def try_one(file, kills, files, promise, life, expected, known):
    run = Run(file, kills)
    try:
        write_files(run.root, files)
        return try_kills(run, life, expected, known, promise)
    finally:
        shutil.rmtree(run.root)


def check(file, args, pool, known):
    """Tries all; prints what falls, each with the command that tries it again; returns how many."""
    start = time.monotonic()
    life, expected = undisturbed(file, **({"KILL_LINES": "1"} if args.lines else {}))
    tried = {}
    for kills in trials(file, [point[:3] for point in life.points], args):
        tried[" + ".join(":".join(map(str, kill)) for kill in kills)] = (kills, {}, (0, 0))
    if "power" in args.modes and not args.pairs:
        for where, files, promise in power_cuts(undisturbed(file, KILL_BUFFERS="1")[0].points):
            tried[":".join(map(str, where))] = ([], files, promise)
    if args.at:
        tried = {name: trial for name, trial in tried.items() if name in args.at}
    names = list(tried)[:: args.every]
    futures = [pool.submit(try_one, file, *tried[name], life, expected, known) for name in names]
    bad = 0
    for name, future in zip(names, futures, strict=True):
        if wrong := future.result():
            bad += 1
            print(f"BAD: {wrong}\n  python -m tools.chain.every_kill {file} --at {name!r}", flush=True)
    counts = collections.Counter(name.partition(":")[0] for name in names)
    minutes = (time.monotonic() - start) / 60
    print(f"{file}: {len(life.points)} points; {dict(counts)}; {bad} bad; {minutes:.1f} min", flush=True)
    return bad


def main():
    parser = argparse.ArgumentParser(prog="python -m tools.chain.every_kill", description=__doc__)
    parser.add_argument("files", nargs="*", default=list(OPTIONS))
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--at", action="append")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--writes", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    bad = 0
    context = multiprocessing.get_context("spawn")
    for file in args.files:
        with concurrent.futures.ProcessPoolExecutor(args.jobs, context) as pool, tempfile.TemporaryDirectory() as known:
            bad += check(file, args, pool, Path(known))
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
