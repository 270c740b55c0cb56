"""Chooses what judges a script, and prints what each of its checks sees."""

import os
import re
import shutil
import sys
import textwrap
import time
from itertools import pairwise

import torch
from torch import nn

import singlegpu
from tools.judge.gpt import GptJudge
from tools.judge.run import WrongError
from tools.judge.shards import ShardsJudge
from tools.judge.stages import EPOCHS, FIRST, NEEDED, STAGES
from tools.judge.toy import ToyJudge
from tools.steps import ROOT
from tools.steps import STAGES as CHAIN


def toy_task():
    """Returns what singlegpu.py trains: model, data set, loss function, optimizer."""
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, singlegpu.ToyDataset(2048), nn.MSELoss(), optimizer


def make_judge(stage, file, task, folder):
    """Returns what judges a script: an object of the class of its stage's kind."""
    kind = ToyJudge
    if stage.shards:
        kind = ShardsJudge
    if stage.reference:
        kind = GptJudge
    return kind(stage, file, task, folder)


def explanation(check):
    """Returns the title and the text of a check on docs/check.md, without Markdown."""
    text = (ROOT / "docs" / "check.md").read_text()
    title, body = re.search(rf"^### {check}: (.*)\n\n((?:.+\n)+)", text, re.M).groups()
    body = re.sub(r"\[([^]]+)\]\(#\S*\)", r"\1", body.replace("\n", " "))
    return title, re.sub(r"\[([^]]+)\]\((\S+?\.md)\S*\)", r'"\1" (docs/\2)', body)


def in_order(checks, first):
    """Returns the checks of a stage, `first` right after those that it builds on."""
    needed = {"starts", "processes", first} | NEEDED.get(first, set())
    needed = needed.union(*(NEEDED.get(check, set()) for check in needed))
    return [check for check in checks if check in needed] + [c for c in checks if c not in needed]


def show(line, final=False):
    """Prints a line; on a terminal also one that is not final, until the next takes its place."""
    if sys.stdout.isatty():
        line = line if final else line[: shutil.get_terminal_size().columns - 1]
        print(f"\r\033[K{line}", end="\n" if final else "", flush=True)
    elif final:
        print(line, flush=True)


def judge(name, file, task, folder, first="", interrupted=lambda: False, note=""):
    """Prints what each check of a stage sees; returns the names of those that fail.

    With `first`, it judges this check first, without a launcher where it can, and ends with the
    first one that fails. If `interrupted` says so between two checks, it returns None; a `note` on
    the line of the check that runs says what interrupts it.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # judged the same everywhere
    stage = STAGES[name]
    judge = make_judge(stage, file, task, folder)
    judge.forks = bool(first)
    width = min(shutil.get_terminal_size((100, 24)).columns, 100) - 6
    failed = []
    checks = in_order(stage.checks.split(), first)
    start = time.monotonic()
    if not sys.stdout.isatty():
        print(f"{len(checks)} checks of: {stage.launchers[0]} {file} {EPOCHS} 1 {stage.options}")
    try:
        for check in checks:
            if interrupted():
                return None
            title, why = explanation(check)
            if (FIRST | NEEDED.get(check, set())) & {*failed}:
                print(f"  ?   {title}: not judged before what failed is right")
                continue
            show(f"  …   {title}{note}")
            try:
                getattr(judge, f"check_{check}")()
                show(f"  ok  {title}", final=True)
            except WrongError as error:
                failed.append(check)
                show(f"FAIL  {title}", final=True)
                saw, *output = str(error).splitlines()
                for text in (textwrap.fill(saw, width), *output, textwrap.fill(why, width)):
                    print(textwrap.indent(text, "      "), flush=True)
                if first:
                    return failed
    finally:
        judge.shell.end_all()
    verdict = f"{len(failed)} of {len(checks)} checks failed"
    if not failed:
        verdict = f"all {len(checks)} checks passed"
    following = dict(pairwise(CHAIN)).get(f"{name}.py", "").removesuffix(".py")
    hint = f"; next: docs/{following}.md" if following and not (failed or first) else ""
    print(f"{verdict} in {time.monotonic() - start:.0f} s{hint}", flush=True)
    return failed
