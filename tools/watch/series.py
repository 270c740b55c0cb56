"""Records the files of the series that docs/watch.md shows: python -m tools.watch.series"""

import json
import tempfile
from pathlib import Path

from tools.launch.jobs import free_port
from tools.pages.colours import RECORDINGS
from tools.steps import ROOT
from tools.watch.__main__ import record

TWO = "torchrun --standalone --nproc_per_node=2 "
NODE = "torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"
SIGTERM = "1 7 15"
# How each starts; how many samples it has; and which rank gets which signal after which step.
RUNS = {
    "singlegpu.py": ("python {script} 2 1 --batch_size 8", 16, ""),
    "multigpu.py": ("python {script} 2 1 --batch_size 4", 16, ""),
    "multigpu_torchrun.py": (TWO + "{script} 2 1 --batch_size 4", 16, ""),
    "multinode.py": (
        f"{NODE} {{script}} 2 1 --batch_size 2 & {NODE} {{script}} 2 1 --batch_size 2; wait",
        16,
        "",
    ),
    "resumable.py": (TWO + "{script} 1 1 --batch_size 4 --save_every_steps 5", 96, ""),
    "preemptible.py": (TWO + "{script} 1 1 --batch_size 4 --save_every_steps 5", 96, SIGTERM),
    "elastic_ddp.py": (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=1"
        " --nproc_per_node=2 {script} 2 1 --global_batch_size 8",
        16,
        "1 1 9",
    ),
    "by_hand/ddp.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "by_hand/zero.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "by_hand/fsdp.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
}


def record_file(file):
    """Returns what the ranks of a file do, with fewer samples than it has, and what it prints."""
    command, samples, fault = RUNS[file]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, Path(file).name)
        text = (ROOT / file).read_text()
        script.write_text(text.replace("ToyDataset(2048)", f"ToyDataset({samples})"))
        command = command.format(script=script, port=free_port())
        # With steps of more than a second, all ranks ask after each whether to stop.
        pause = "1.1" if fault == SIGTERM else "0"
        return record(command, script, Path(folder), WATCH_SIGNAL=fault, WATCH_PAUSE=pause)


def main():
    recordings = {}
    for file in RUNS:
        recordings[file], _ = record_file(file)
        size = len(json.dumps(recordings[file]))
        print(f"{file}: {size:,} bytes, {recordings[file]['end'] or 'ended'}")
    RECORDINGS.write_text(json.dumps(recordings, separators=(",", ":")))


if __name__ == "__main__":
    main()
