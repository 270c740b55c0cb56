"""Judges your training script by what it does: make check STAGE=multigpu FILE=my_multigpu.py

It starts the script as the page of that stage does, on CPU processes, and looks at which samples
they take, what they print, and what they save. The weights must equal those of a plain loop over
the same batches. Names and structure are up to you; the arguments, the log lines and the contents
of a snapshot must stay as in singlegpu.py. docs/check.md explains each check. WATCH=1 judges the
script again at each save, until it passes.
"""

import argparse
import importlib.util
import sys
import tempfile
import traceback
from pathlib import Path

from rankcheck.launch.scripts import end_at_signals

from tools.judge.stages import STAGES

TASK = "it must return a model, a data set, a loss function and an optimizer"


def load_task(name):
    """Returns the function that `name` stands for, as in my_model.py:make_task."""
    path, _, function = name.partition(":")
    if not (Path(path).is_file() and function):
        sys.exit(f"--task {name} is not a file and its function, such as my_model.py:make_task")
    sys.path.insert(1, str(Path(path).resolve().parent))  # behind the tools, which ranks import
    spec = importlib.util.spec_from_file_location("task", path)
    module = sys.modules["task"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        make_task = getattr(module, function)
        model, dataset, loss_fn, optimizer = make_task()
        inputs, targets = dataset[0]
        loss_fn(model(inputs[None]), targets[None]).backward()
        optimizer.step()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" in line {frame.lineno}" for frame in frames if frame.filename == spec.origin]
        place = "".join(lines[-1:])
        sys.exit(f"--task {name} fails{place}: {type(error).__name__}: {error} ({TASK})")
    return make_task


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", nargs="?", default="")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--task", help="my_model.py:make_task: see docs/check.md")
    parser.add_argument(
        "--watch", action="store_true", help="judge it at each save, until it passes"
    )
    args = parser.parse_args()
    if not args.stage and not args.task:
        print("It can judge your script for:", *STAGES, sep="\n  ")
        return
    if args.stage not in STAGES:
        parser.error(f"no stage {args.stage!r}: choose from {', '.join(STAGES)}")
    if not args.file or str(args.file) == ".":
        parser.error(f"name your file, as in FILE=my_{Path(args.stage).stem}.py")
    if not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    # These import torch, for which a typing mistake need not wait.
    from tools.judge.checks import judge, toy_task
    from tools.judge.watch import watch

    end_at_signals()
    task = load_task(args.task) if args.task else toy_task
    if args.watch:
        watch(args.stage, args.file, task)
        return
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(bool(judge(args.stage, args.file, task, Path(folder))))


if __name__ == "__main__":
    main()
