"""Records what docs/watch.md shows, all or some: python -m tools.watch.series [FILE ...]"""

import json
import re
import socket
import sys
import tempfile
from pathlib import Path

from rankcheck.launch.jobs import free_port
from rankcheck.watch.record import record

from tools.launch.snapshots import write_text
from tools.watch.recordings import RECORDINGS, recorded_source

TWO = "torchrun --standalone --nproc_per_node=2 "
FOUR = TWO.replace("2", "4")
NODE = "torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:{port}"
STEPS_5 = "{script} 1 1 --batch_size 4 --save_every_steps 5"
GPT = "{script} 1 1 --n_layer 2 --n_head 1 --n_embd 8 --context 8 --text text --val_tokens 64"
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
    "resumable.py": (TWO + STEPS_5, 96, ""),
    "preemptible.py": (TWO + STEPS_5, 96, "1 7 15"),
    "elastic_ddp.py": (
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts=1"
        " --nproc_per_node=2 {script} 2 1 --global_batch_size 8 --save_every_steps 1",
        16,
        "1 1 9",
    ),
    "by_hand/ddp.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "by_hand/zero.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "by_hand/fsdp.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "recipes/fsdp.py": (TWO + "{script} 1 1 --batch_size 4", 16, ""),
    "gpt/fsdp.py": (f"{TWO}{GPT} --batch_size 4 --generate 0", 0, ""),
    "gpt/hsdp.py": (f"{FOUR}{GPT} --batch_size 2 --generate 0 --shard_size 2", 0, ""),
    "fault 2: multigpu.py": ("python {script} 2 1 --batch_size 4", 16, ""),
    "fault 9: preemptible.py": (TWO + STEPS_5, 96, "1 2 15"),
}


def record_file(file):
    """Returns what the ranks of a file do, with fewer samples than it has, and what it prints."""
    command, samples, fault = RUNS[file]
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder, "text"), 24, 8)
        script = Path(folder, Path(file.rpartition(" ")[2]).name)
        text = recorded_source(file)
        script.write_text(text.replace("ToyDataset(2048)", f"ToyDataset({samples})"))
        command = command.format(script=script, port=free_port())
        # With steps of more than a second, all ranks ask after each whether to stop.
        pause = "1.1" if "next_check" in text else "0"
        return record(command, script, Path(folder), WATCH_SIGNAL=fault, WATCH_PAUSE=pause)


def main():
    recordings = json.loads(RECORDINGS.read_text())
    for file in sys.argv[1:] or RUNS:
        recordings[file], _ = record_file(file)
        size = len(json.dumps(recordings[file]))
        print(f"{file}: {size:,} bytes, {recordings[file]['end'] or 'ended'}")
    kept = {file: recordings[file] for file in RUNS if file in recordings}
    text = json.dumps(kept, separators=(",", ":"))
    RECORDINGS.write_text(re.sub(rf"\b(of|on) {socket.gethostname()}\b", r"\1 laptop", text))


if __name__ == "__main__":
    main()
