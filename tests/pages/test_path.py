"""A new user's path: types every command of README and the pages, in their order, in a clone."""

import json
import os
import re
import shutil
import sys
import time
from typing import NamedTuple

import pytest
from helpers import needs_slurm, run
from rankcheck.launch.jobs import TIMEOUT_S
from terminal import Terminal, agrees, eventually

from tools.steps import ROOT

ON_A_CLUSTER = re.compile(r"(\w+=\S+ )*(sbatch|srun|squeue|scancel|sinfo|scontrol)\b")
CLUSTER_SHELL = re.compile(r"slurm/pocket-cluster( -\S+ \S+)*$")


class Row(NamedTuple):
    """Commands that are not just typed, or with `why` alone: commands and texts that are left out.

    Some do not end by themselves: `until` is what they print first. After that they run on, and
    what the page shows next is typed into another terminal, unless `stop`: then Ctrl-C ends them.
    What has `joined` is typed into so many terminals, each once the one before printed that.
    """

    where: str  # a regular expression: the page, and how the command or text starts
    why: str
    typed: tuple = ()  # (old, new)
    before: str = ""  # a command that the page says in words
    status: int = 0
    until: str = ""
    stop: bool = False
    joined: tuple = ()

    @property
    def is_left_out(self):
        return self == Row(self.where, self.why)


def code(page, number, file):
    """Returns the row of the commands that start what a page calls `file`, a Python fence."""
    awk = f"/^```/ {{inside = /^```python/; n += inside; next}} inside && n == {number}"
    start = rf".*: .*(python|torchrun .*) {file}"
    return Row(start, f"the code of {page}", before=f"awk '{awk}' docs/{page} > {file}")


PY_SPY = "pgrep -f -- '-u barrier.py' | xargs -n 1 py-spy dump --pid"
SLOW = "on node3 tc qdisc replace dev eth0 root tbf rate 20mbit burst 64kb latency 300ms"
STACKS = "grep -l 'File .*timer.py' logs/timer/*/*/*/stderr.log | wc -l"
HANGS = "0 of 50 epochs done"
EXCEPTIONS = [
    Row("README.md: make run", "the next page types it"),
    Row(
        "index.md: make run",
        "quicker, and beside a folder of another run",
        ("make run", "python -m tools.chain.run --no-slurm"),
        before="mkdir -p runs/other.run",
    ),
    Row(".*: make check ", "test_check.py checks files: the reader's is not there"),
    Row(".*: diff ", "diff ends with 1 where it finds something", status=1),
    Row(
        "multigpu_torchrun.md: torchrun .* killed.pt",
        "a second terminal kills it",
        until="epoch 100 ",
    ),
    Row(r"(multinode|elastic_ddp|own_disks).md: (\. |ex|mk)", "each", joined=("",) * 3),
    Row("multinode.md: torchrun ", "on two nodes", joined=("",) * 2),
    Row("resumable.md: torch", "Ctrl-C", until="saved resumable.pt", stop=True),
    Row("preemptible.md: torch", "Ctrl-C", until="saved preemptible.pt", stop=True),
    Row(
        "elastic_ddp.md: torchrun ",
        "three nodes, of which the last one leaves",
        joined=(
            r"of 2 \S+ \S+ starts",
            r"of [46] \S+ \S+ starts",
            r"(?s)of 6 \S+ \S+ starts.*\d of 5000 epochs done",
        ),
        stop=True,
    ),
    Row(
        "own_disks.md: torchrun ",
        "two nodes",
        joined=(r"of 2 \S+ \S+ starts", r"(?s)of 4 \S+ \S+ starts.*saved own_disks.pt"),
    ),
    Row("save_after_failure.md: torch", "a rank is killed", until="saved save_after_failure.pt"),
    Row("stream.md: torchrun ", "Ctrl-C", until="saved stream.pt", stop=True),
    Row("first_job.md: make ", "is there", ("make", "make -o requirements.txt -o constraints.txt")),
    Row(
        "first_job.md: sbatch .*check_cluster.py",
        "with a slow node, and fewer ranks",
        ("node=4", "node=1"),
        before=SLOW,
        until="slow nodes: .*node3",
    ),
    Row("first_job.md: 0: node  ", "speeds"),
    Row(".*: sudo ", "changes the machine"),
    Row("launchers.md: sbatch .*node=4", "fewer ranks", ("node=4", "node=1")),
    Row("launchers.md: .*submit.py", "fewer ranks", ("node 4", "node 1")),
    Row("job_files.md: ", "test_lines_for_job_files in test_slurm.py does that"),
    Row("index.md: git merge-file", "a file of one's own", before="cp multinode.py mine.py"),
    Row("monitor.md: tensorboard ", "a server", until=r"to quit\)", stop=True),
    Row("verify.md: torchrun .*faulty.py", "fails, as the page says", status=1),
    code("recipes/verify.md", 1, "trace_nan.py")._replace(status=1),  # as the page says
    Row("images.md: (Global|step 1|RuntimeError)", "test_images.py runs that"),
    Row("step_timeout.md: torchrun ", "a second terminal stops it", until="saved step_timeout.pt"),
    Row("step_timeout.md: sbatch ", "test_step_timeout.py makes that file"),
    Row("audit.md: pip ", "make run has installed it"),
    code("audit.md", 1, "my_train.py")._replace(where="audit.md: rankcheck ", status=1),
    Row(
        "compose.md: .* --upgrade",
        "a copy of that version",
        before="git show $(git log -S'## 1.0' --format=%h CHANGELOG.md):multinode.py > my_train.py",
    ),
    Row("evaluate.md: the gradient of", "test_gradient_that_is_nan provokes that"),
    Row("errors.md: (export|getent|ss|ip|srun .*date)", "test_hangs.py and others do that"),
    Row("errors.md: torchrun .*(barrier|timer).py", "hangs", until=HANGS),
    Row("errors.md: pgrep", "wait", before=f"until {PY_SPY} | grep _save_s; do sleep 1; done"),
    Row("errors.md: tr ", "rank 0", ("NUMBER", "$(pgrep -f -- '-u barrier.py' | head -n 1)")),
    Row(
        "errors.md: squeue ",
        "a job that hangs",
        before="sbatch --gpus-per-node=1 slurm/multinode.sbatch barrier.py 50 10",
    ),
    Row(
        "errors.md: srun ",
        "no shell",
        ("NODE --pty bash", "node2 --pty hostname"),
        before="until squeue | grep ' R '; do sleep 1; done",
    ),
    Row("errors.md: sed .*timer.py", "sooner", ("(20)", "(2)")),
    Row("errors.md: tail ", "wait", before=f"until [ $({STACKS}) = 2 ]; do sleep 1; done"),
    Row("errors.md: (torchfr|  error_file)", "test_hangs.py provokes that"),
    Row("errors.md: torchrun .*stopped.py", "test_hangs.py answers the debugger"),
]


def pages():
    """Returns README and the pages in the order of the site."""
    nav = re.findall(r" (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    return ["README.md", *nav]


def fences(page):
    """Returns the commands and the outputs that a page shows, in their order."""
    text = (ROOT if page == "README.md" else ROOT / "docs").joinpath(page).read_text()
    shown = []
    for kind, content in re.findall(r"^```(sh|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if kind == "text":
            shown.append((kind, content))
            continue
        for line in re.sub(r" \\\n +", " ", content).splitlines():
            shown.append((kind, line.partition("  #")[0].strip()))
    return shown


def exception(page, text):
    """Returns the row of EXCEPTIONS for a command or text, or None."""
    found = (row for row in EXCEPTIONS if re.search(rf"(^|/){row.where}", f"{page}: {text}"))
    return next(found, None)


class Reader:
    """Follows one page, in as many terminals as it takes."""

    def __init__(self, folder, page):
        self.folder = folder
        self.page = page
        self.terminals = []
        self.login_host = None
        self.starts = {}  # where in each terminal's output begins what the next text shows
        self.text_is_due = False
        self.terminal(0).run(". .venv/bin/activate")

    def terminal(self, number):
        while len(self.terminals) <= number:
            self.terminals.append(Terminal(self.folder))
        return self.terminals[number]

    def follow_page(self):
        last = None
        for kind, text in fences(self.page):
            row = exception(self.page, text)
            if kind == "text":
                if self.text_is_due and not (row and row.is_left_out):
                    self.shows(text)
            elif row and row.is_left_out:
                self.text_is_due = False
            else:
                if last == "text":
                    self.starts = {t: len(t.output) for t in self.terminals}
                self.text_is_due = True
                self.type(text, row or Row("", ""))
            last = kind
        for terminal in self.terminals:
            terminal.interrupt()
        self.leave_cluster()
        for terminal in self.terminals:
            terminal.bash.close(force=True)

    def type(self, command, row):
        if row.typed:
            assert command.count(row.typed[0]) == 1, command
            command = command.replace(*row.typed)
        if row.joined:
            self.join(command, row)
            return
        terminal = self.free_terminal()
        self.enter_cluster(terminal, command)
        if row.before:
            terminal.run(row.before)
        command = self.filled_in(command)
        if command.startswith("tail -F"):
            terminal.enter(command.replace("-F", "-n +1 -F"))
            terminal.sees("saved ")
        elif row.until and not ON_A_CLUSTER.match(command):
            terminal.enter(command)
            terminal.sees(row.until)
            if row.stop:
                terminal.interrupt()
        else:
            terminal.run(command, row.status)
            self.follow_job(terminal, command, row.until)

    def free_terminal(self):
        """Returns a terminal to type into; a log that is followed there is left."""
        for number in range(len(self.terminals) + 1):
            terminal = self.terminal(number)
            if re.match(r".*tail -n \+1", terminal.read()):
                terminal.interrupt()
            if not terminal.is_busy():
                return terminal
        raise AssertionError("unreachable")

    def join(self, command, row):
        nodes = [self.terminal(number) for number in range(len(row.joined))]
        for number, (node, pattern) in enumerate(zip(nodes, row.joined, strict=True), 1):
            node.enter(command)
            if pattern:
                eventually(lambda output, p=pattern: re.search(p, output), nodes[:number])
        if row.stop:
            nodes[-1].interrupt()
        if not any(row.joined):
            assert [node.status() for node in nodes] == [0] * len(nodes), nodes[0].output

    def filled_in(self, command):
        """Returns the command with the numbers that the page asks for."""
        command = re.sub(r"\bJOB\b", lambda _: self.job(), command)
        return re.sub(r"\bNUMBER\b", lambda _: self.process(), command)

    def job(self):
        return re.findall(r"Submitted batch job (\d+)", self.login_host.output)[-1]

    def process(self):
        """Returns the last process of this clone that `pgrep` has listed."""
        output = "".join(terminal.read() for terminal in self.terminals)
        numbers = re.findall(r"^(\d+)\r?$", output, re.MULTILINE)
        clone = os.path.realpath(self.folder)
        return [n for n in numbers if os.path.realpath(f"/proc/{n}/cwd") == clone][-1]

    def enter_cluster(self, terminal, command):
        """Sees that commands of Slurm are typed on the login host of a cluster."""
        if CLUSTER_SHELL.match(command):
            self.leave_cluster()
            self.login_host = terminal
        elif command == "exit":
            self.login_host = None
        elif ON_A_CLUSTER.match(command) and not self.login_host:
            terminal.run("slurm/pocket-cluster -n 3")
            self.login_host = terminal

    def leave_cluster(self):
        if self.login_host:
            self.login_host.run("squeue -ho %i | xargs -r scancel")
            self.login_host.enter("exit")
            self.login_host.status()
            self.login_host = None

    def follow_job(self, terminal, command, until):
        """Waits until the job that was submitted has saved."""
        printed = re.search(r"follow +(tail.*?)\r", terminal.read())
        saved = re.search(r"--snapshot_path (\S+)", command)
        if printed:
            terminal.enter(printed[1].replace("-qF", "-n +1 -qF"))
        elif self.login_host and "\nSubmitted batch job" in terminal.read() and (saved or until):
            log = f"*-{self.job()}.out"
            terminal.enter(f"until ls {log}; do sleep 1; done; tail -n +1 -F {log}")
        else:
            return
        terminal.sees(until or f"saved {saved[1]}")
        terminal.interrupt()

    def shows(self, text):
        """Asserts that one terminal shows, or soon shows, what the page shows."""
        busy = any([terminal.is_busy() for terminal in self.terminals])
        deadline = time.monotonic() + (TIMEOUT_S if busy else 0)
        while not any(agrees(self.output_of(t), text) for t in self.terminals):
            outputs = "\n".join(self.output_of(t) for t in self.terminals)
            # As docs/errors.md says: torchrun has ended a process while that wrote its error.
            if self.page == "multigpu_torchrun.md" and "JSONDecodeError" in outputs:
                return
            assert time.monotonic() < deadline, f"{self.page}: no\n{text}in\n{outputs}"
            time.sleep(0.1)

    def output_of(self, terminal):
        terminal.read()
        return terminal.output[self.starts.get(terminal, 0) :]


@pytest.fixture
def clone(tmp_path):
    """A fresh clone with what is not committed yet, and the environment of these tests."""
    folder = tmp_path / "clone"
    assert run("git", "clone", ROOT, folder).returncode == 0
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


LAST_STAGE = pages().index("elastic_job.md") + 1
END_TO_END = "gpt/end_to_end.md"
# With index.md, one types make run, which trains with all stages once more.
STAGES = [name for name in pages()[:LAST_STAGE] if name != "index.md"]
REST = [name for name in pages() if name not in [*STAGES, END_TO_END]]


@pytest.mark.path
@needs_slurm
@pytest.mark.parametrize(
    "names", [STAGES, pytest.param(REST, marks=pytest.mark.nightly)], ids=["stages", "rest"]
)
def test_path(clone, names):
    for name in names:
        print(name)
        Reader(clone, name).follow_page()


def test_each_page_has_snapshots_of_its_own():
    """Who follows several pages in one folder resumes from no other script's snapshot."""
    page_of = {}
    for page in pages():
        text = (ROOT if page == "README.md" else ROOT / "docs").joinpath(page).read_text()
        for path in re.findall(r"(?<!FILE )--snapshot_path[ =]([\w./]*\w)", text):
            assert page_of.setdefault(path, page) == page, path


@needs_slurm
@pytest.mark.long
def test_cheat_sheet(tmp_path):
    """Its commands succeed, in its order; and jobs end with the exit codes that it explains."""
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "activate").write_text("PATH=$PWD/.venv/bin:$PATH\n")
    (environment / "torchrun").write_text("#!/bin/sh\necho started; exec sleep 1000\n")
    (environment / "torchrun").chmod(0o755)
    page = (ROOT / "docs" / "cheat_sheet.md").read_text()
    # The first cell of a row: a command, and ° if this cluster lacks what it needs.
    rows = re.findall(r"^\| `((?:[a-z]+) [^`]+|sinfo)` (°?) ?\|", page, re.MULTILINE)
    assert len(rows) == 23
    terminal = Terminal(tmp_path)
    terminal.run("slurm/pocket-cluster -n 2 -g 4")
    job = None
    for command in [command for command, elsewhere in rows if not elsewhere]:
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


def solve(question):
    """Returns the right answer to a question of END_TO_END, in capitals or a sum."""
    if word := re.fullmatch(r"Write ([a-z]+) in capitals\.", question):
        return word[1].upper()
    a, b = re.fullmatch(r"What is (\d+) \+ (\d+)\?", question).groups()
    return str(int(a) + int(b))


@pytest.mark.path
@pytest.mark.nightly
def test_end_to_end(clone):
    """A model that the page's commands have made answers 40 of 50 questions that are new to it."""
    Reader(clone, END_TO_END).follow_page()
    folder = clone / "real_run"
    questions, answers = (
        folder.joinpath(name).read_text().splitlines() for name in ("questions.txt", "answers.txt")
    )
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").open()]
    assert len(set(questions)) == 50 and not {chat[0]["content"] for chat in chats} & set(questions)
    right = [answer == solve(question) for question, answer in zip(questions, answers, strict=True)]
    assert sum(right) >= 40, list(zip(questions, answers, right, strict=True))
