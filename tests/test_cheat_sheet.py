"""docs/cheat_sheet.md: its commands, typed into a terminal on the pocket cluster."""

import re

from helpers import needs_slurm
from test_path import Terminal

from tools.steps import ROOT

PAGE = (ROOT / "docs" / "cheat_sheet.md").read_text()
# The first cell of a row: a command, and ° if this cluster lacks what it needs.
COMMANDS = re.findall(r"^\| `((?:[a-z]+) [^`]+|sinfo)` (°?) ?\|", PAGE, re.MULTILINE)


@needs_slurm
def test_commands(tmp_path):
    """They succeed, in the page's order; and jobs end with the exit codes that it explains."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text("PATH=$PWD/.venv/bin:$PATH\n")
    (environment / "torchrun").write_text("#!/bin/sh\necho started; exec sleep 1000\n")
    (environment / "torchrun").chmod(0o755)
    assert len(COMMANDS) == 22
    terminal = Terminal(tmp_path)
    terminal.run("slurm/pocket-cluster -n 2 -g 4")
    job = None
    for command, elsewhere in COMMANDS:
        if elsewhere:
            continue
        if command.startswith("salloc"):
            command += " true"  # on a busy machine, its shell sometimes never shows a prompt
        terminal.enter(command.replace("JOB", str(job)).replace("NODE", "node2"))
        if command.startswith("tail"):
            terminal.sees("started")
            terminal.interrupt()
            continue
        assert terminal.status() == 0, terminal.output
        if submitted := re.search(r"Submitted batch job (\d+)", terminal.read()):
            job = submitted[1]
        if "--pty" in command:
            terminal.run("exit")
    for ending, shown in [("exit 1", "1:0"), ("kill -9 $$", "0:9")]:
        terminal.run(f"sbatch --output=/dev/null --wrap '{ending}'")
        job = re.search(r"Submitted batch job (\d+)", terminal.read())[1]
        ended = f"scontrol show job {job} | grep -E 'JobState=(FAILED|COMPLETED)'"
        terminal.run(f"until {ended}; do sleep 0.1; done; scontrol show job {job}")
        assert f"ExitCode={shown}" in terminal.read() and "JobState=FAILED" in terminal.read()
    terminal.enter("exit")
    terminal.status()
