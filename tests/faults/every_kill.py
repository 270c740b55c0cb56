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
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rankcheck.launch.jobs import SERVERS, TimeLimit

from tools.launch.jobs import Ranks
from tools.launch.patched import patch
from tools.launch.snapshots import (
    equal_snapshots,
    load_gpt,
    logged_positions,
    make_model,
    write_chats,
    write_text,
    write_tokens,
)
from tools.steps import ROOT

LIFE_S = 60  # of a life, which takes a second where the machine is not busy
MANY_WRITES = 300  # into files of one name: more than the three snapshots of the toy take
SETUP = f"""
sys.path.insert(0, {str(ROOT)!r})
from tests.faults import kill_points
kill_points.install(script)
"""
# Two epochs of three steps. They save after the first, within the second, and after it.
OPTIONS = """--batch_size 4 --global_batch_size 8 --save_every_steps 4 --val_tokens 64 --generate 0
    --shards .. --text ../text --data ../tokens --model ../model
    --export_path exported --context 8 --n_layer 1 --n_head 2 --n_kv_head 2 --n_embd 8
    --micro_batches 2 --tp_size 2 --cp_size 2 --sync_every 2"""  # a script gets those that it has
MORE = {  # for the files of these names
    "finetune_chat.py": " --context 40 --val_tokens 320",
    "pipeline_parallel.py": " --pp_size 2 --n_layer 2",
}
NIGHTLY = """resumable.py preemptible.py elastic_ddp.py recipes/own_disks.py
    recipes/save_after_failure.py gpt/dcp.py gpt/fsdp.py gpt/async_save.py gpt/finetune_chat.py"""
NOT_BY_TORCHRUN = ("singlegpu.py", "multigpu.py")
SIGTERMS = {"sigterm", "sigterm_twice"}
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


def stack(pid):
    """Returns where a process that hangs waits, if py-spy is there to ask."""
    if not shutil.which("py-spy"):
        return ""
    command = ["py-spy", "dump", "--subprocesses", "--pid", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIFE_S).stdout


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
        script = patch(self.folder, file, SETUP)
        # Each node of own_disks.py has a disk of its own.
        self.nodes = [self.folder / f"node{n * (script.stem == 'own_disks')}" for n in range(2)]
        source = (ROOT / file).read_text()
        known = re.findall(r"(--\w+) (\S+)", OPTIONS)
        options = [f"{name} {value}" for name, value in known if f'"{name}"' in source]
        self.command = f"{script} 2 1 {' '.join(options)}{MORE.get(script.name, '')}"
        if "p_size 2" in self.command:  # both ranks share each batch
            self.command += " --batch_size 8"
        lines = "".join(f"{[number / 24] * 10}\n" for number in range(24))
        (self.folder / "0.jsonl").write_text(lines)
        write_text(self.folder / "text", 24 + 8, 8)
        write_tokens(self.folder / "tokens", 24 + 8, 8)
        if 'default="snapshot"' in source:  # a copy that the user keeps
            (self.nodes[0] / "snapshot" / "epoch_best").mkdir(parents=True)
        if '"--model"' in source:
            # Else, each rank imports them, for seconds.
            modules = ["transformers.models.llama.modeling_llama", "torch.distributed.checkpoint"]
            SERVERS[0].set_forkserver_preload(modules)
            make_model(self.folder / "model", "Llama")
            write_chats(self.folder / "text", 24 + 8)

    def fired(self):
        return len(list(self.control.glob("*.fired")))

    def live(self):
        for path in [*self.control.glob("*.pid"), *self.control.glob("points")]:
            path.unlink()
        job = Ranks(self.command, self.nodes, self.variables, ())
        limit = TimeLimit(LIFE_S)
        while job.status() is None and not limit.passed():
            if any(rank.exitcode for rank in job.ranks):  # which each node's torchrun learns
                for rank in job.ranks:
                    rank.terminate()
            time.sleep(0.01)
        status, output = job.status(), job.output
        if status is None:
            output += "".join(stack(rank.pid) for rank in job.ranks)
        job.end()
        job.log.unlink()
        points = []
        with contextlib.suppress(OSError, EOFError), open(self.control / "points", "rb") as file:
            while True:
                points.append(pickle.load(file))
        return Life(status, output, read_files(self.folder), points)

    def live_unless_known(self, lives):
        """Returns the life that starts from the files as they are: it knows of nothing else."""
        files = repr(read_files(self.folder)).encode()
        path = lives / hashlib.sha256(files).hexdigest()
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_bytes(pickle.dumps(self.live()))
            part.rename(path)
        return pickle.loads(path.read_bytes())


def read_files(folder):
    """Returns the content of each file, without the logs of TensorBoard and traces."""
    paths = sorted(folder.glob("node*/**/*"))
    paths = [path for path in paths if not re.search(r"\.(logs|trace\.json)\b", str(path))]
    contents = [None if path.is_dir() else path.read_bytes() for path in paths]
    return dict(zip([str(path.relative_to(folder)) for path in paths], contents, strict=True))


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
        return [load_gpt(path) for path in sorted(Path(folder).glob("node?/snapshot*"))]


def names_of(files):
    """Returns the files' names. Of the folders of snapshots, only the last is sure to be equal:

    a life counts steps from where it resumes, and may save at others before it ends.
    """
    last = max(re.findall(FOLDER, " ".join(files)), default="")
    return sorted(re.sub(f"(?!{last}){FOLDER}", "earlier", name) for name in files)


def difference(files, expected, file):
    """Returns in what the end of a run differs from the undisturbed run's, or ""."""
    if files == expected:
        return ""
    names = names_of(files)
    if names != names_of(expected):
        return f"it leaves {names}, not {names_of(expected)}"
    if any(files[name] != expected[name] for name in names if "/snapshot" not in name):
        return "what it exports is not the same"
    for one, other in zip(snapshots(files), snapshots(expected), strict=True):
        # A resumed run adds the same numbers in another order; a survivor has a part of them.
        tolerance = 0.5 if "save_after_failure" in file else 1e-5
        close = math.isclose(one.pop("loss", 0), other.pop("loss", 0), rel_tol=tolerance)
        if not (close and equal_snapshots(one, other)):
            return "its weights, optimizer, loss or position are not the same"
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
    for end, point in enumerate(points):
        log = "".join(more[0] for _, name, _, more in points[:end] if name == "log")
        for mode in ("power", "power_and_renames"):
            files = after_power_cut(points[:end], mode == "power_and_renames")
            trial = ([], files, promised(log, lost=1))
            found[repr(trial)] = (name_of([(mode, *point[:3])]), trial)
    return dict(found.values())


def name_of(kills):
    return "+".join(":".join(map(str, kill)) for kill in kills)


def kills_of(file, points, num_pairs, rng):
    """Returns the kills of each run: a kind at a point; of very many writes, at some of them."""
    if num_pairs:
        ranks = [[("rank", *point) for point in points if point[0] == rank] for rank in (0, 1)]
        return [[*map(rng.choice, ranks)] for _ in range(num_pairs)]
    times = collections.Counter(point[:2] for point in points)
    many = {key: n for key, n in times.items() if key[1].startswith("write") and n > MANY_WRITES}
    some = {key: rng.sample(range(1, n + 1), 20) for key, n in many.items()}
    kept = [point for point in points if point[2] in some.get(point[:2], [point[2]])]
    kinds = {"rank", "all"} | (SIGTERMS if Path(file).name in STOPPED else set())
    return [[(kind, *point)] for kind in sorted(kinds) for point in kept]


def try_kills(trial, file, expected, lives):
    """Returns what is wrong after some kills, or "", or None if a kill was missed.

    The first life finds `files`, and must not start from before `promise`.
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
    return difference(life.files, expected.files, file)


def undisturbed(file, **variables):
    with tempfile.TemporaryDirectory() as folder:
        life = Run(folder, file, **variables).live()
    if life.status != 0:
        sys.exit(f"every_kill: {file} fails without a kill: {life.output}")
    return life


def trials_of(file, points, num_pairs=0, rng=random):
    """Returns what `try_kills` is to try, by name."""
    kills = kills_of(file, [point[:3] for point in points], num_pairs, rng)
    cuts = {} if num_pairs else power_cuts(undisturbed(file, KEEP_BUFFERS="1").points)
    return {name_of(some): (some, {}, (0, 0)) for some in kills} | cuts


def check(file, args):
    """Prints each failure with the command that repeats it; returns how many there are."""
    start, rng = time.monotonic(), random.Random(args.seed)
    expected = undisturbed(file)
    trials = trials_of(file, expected.points, args.pairs, rng)
    names = fnmatch.filter(trials, args.at)
    if not names:
        sys.exit(f"every_kill: {file} has no kill {args.at}")
    names = rng.sample(names, math.ceil(len(names) * args.share))
    pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
    with pool, tempfile.TemporaryDirectory() as lives:
        more = (file, expected, Path(lives))
        tried = {name: pool.submit(try_kills, trials[name], *more) for name in names}
        results = {name: future.result() for name, future in tried.items()}
    wrong = {name: result for name, result in results.items() if result}
    command = f"python -m tests.faults.every_kill {file} --seed {args.seed}"
    command += f" --pairs {args.pairs}" if args.pairs else ""
    for name, result in wrong.items():
        print(f"{command} --at '{name}'\n  {result}")
    kinds = collections.Counter(name.partition(":")[0] for name in names)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    missed = list(results.values()).count(None)
    minutes = (time.monotonic() - start) / 60
    counts += f": {len(wrong)} bad, {missed} missed, {minutes:.1f} minutes"
    print(f"{file}: {len(expected.points)} points: {counts}", flush=True)
    return len(wrong) + (missed > len(names) / 20)  # an mkdir, if another rank was faster


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.faults.every_kill", description=__doc__)
    parser.add_argument("files", nargs="*", default=NIGHTLY.split(), metavar="FILE")
    parser.add_argument("--at", default="*", help="only here: a failure as printed, or a pattern")
    parser.add_argument("--share", type=float, default=1, help="of the kills, at random")
    parser.add_argument("--pairs", type=int, help="of points, of both ranks, instead of all points")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for file in args.files:
        if not Path(ROOT, file).is_file():
            parser.error(f"{file} is no file")
        if "\nclass Trainer" not in Path(ROOT, file).read_text():
            parser.error(f"{file} has no trainer: it must be a stage, a recipe or another step")
        if Path(file).name in NOT_BY_TORCHRUN:
            parser.error(f"{file} is not started by torchrun: name a script that is")
    if not 0 < args.share <= 1:
        parser.error("--share must be more than 0, and 1 at most")
    sys.exit(sum([check(file, args) for file in args.files]) > 0)


if __name__ == "__main__":
    main()
