"""Records which lines all ranks of a script run, as a page to watch.

rankcheck watch my_multigpu.py 2 1 --batch_size 4
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from html import escape
from pathlib import Path

from rankcheck.launch.scripts import launcher, sources
from rankcheck.watch.record import record

END = {
    "": "The run has ended.",
    "fails": "The run has failed.",
    "hangs": "The run hangs.",
    "limit": "The first 20 steps, or 2,000 lines.",
    "waits": "For minutes, no rank has run a line of its own.",
}
ASSETS = Path(__file__).parent
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style>
<main class="md-typeset"><h1>{title}</h1><p>{end}</p>
<div class="watch" hidden><script type="application/json">{data}</script></div></main>
<script>{script}</script></html>
"""


def write_page(path, title, end, data):
    """Writes the player and what it plays into one file."""
    page = PAGE.format(
        title=escape(title),
        end=end,
        style=(ASSETS / "watch.css").read_text(),
        script=(ASSETS / "watch.js").read_text(),
        data=json.dumps(data).replace("</", r"<\/"),
    )
    path.write_text(page)


def main(arguments):
    parser = argparse.ArgumentParser(prog="rankcheck watch", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launcher", choices=["python", "torchrun"], help="how to start it")
    parser.add_argument("-o", "--output", type=Path, help="the page; by default, SCRIPT.html")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    args = parser.parse_args(arguments)
    if not args.script.is_file():
        parser.error(f"there is no file {args.script}")
    script = args.script.resolve()
    output = args.output or Path(f"{args.script}.html")
    text = sources(args.script)
    start = args.launcher or launcher(text)
    if start == "torchrun":
        start += f" --standalone --nproc_per_node={args.ranks}"
    needs_gpus = re.search("cuda|nccl", text) and not re.search("is_available|accelerator", text)
    # The compiler would look into what pretends the GPUs.
    gpus = {"PRETEND_GPUS": "8", "TORCHDYNAMO_DISABLE": "1"} if needs_gpus else {}
    command = f"{start} {shlex.join([str(script), *args.arguments])}"
    with tempfile.TemporaryDirectory() as folder:  # where no snapshot of the reader's is in use
        recording, log = record(command, script, Path(folder), **gpus)
    if not recording["attempts"]:
        printed = "\n".join(log.splitlines()[-20:])
        sys.exit(f"watch: {script.name} has run no line of its own:\n{printed}")
    lines = [escape(line) for line in script.read_text().split("\n")]
    recording["code"] = list(range(len(lines)))
    data = {"lines": lines, "files": {script.name: recording}}
    try:
        write_page(output, script.name, END[recording["end"]], data)
    except OSError as error:
        sys.exit(f"watch: cannot write {output}: {error.strerror}")
    if recording["end"] == "fails":
        said, torchrun, _ = log.partition("torch/distributed/elastic/multiprocessing/api.py")
        print(*said.splitlines()[-20 : -1 if torchrun else None], sep="\n")
    print(f"{END[recording['end']]} Watch it: {output}")
