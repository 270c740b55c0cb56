"""Starts the files of this series for tests and tools, and says what they should print.

What starts ranks is rankcheck's; here is what it need not know: where the series is, its known
warnings, and torchrun's own process.
"""

import os
import re
import shlex
import shutil
from pathlib import Path

from rankcheck.launch import jobs

from tools.steps import ROOT

SCRIPT_PATH = r"((recipes|by_hand|gpt|ports)/)?\w+\.py"
KNOWN_WARNINGS = [
    # DDP, of every device that is no GPU of NVIDIA's, as the pretended ones.
    r".*Time stats are currently only collected for .*\n",
    # The compiler, of Python 3.13.0, and of a GPU with fewer processors than it tunes for.
    r".*Consider upgrading to Python 3.13.1.*\n *warnings.warn\(\n",
    r".*Not enough SMs to use max_autotune_gemm mode.*\n",
    # The compiler, of moe.py, whose router is to be in float32.
    r".*TensorFloat32 tensor cores .*\n *warnings.warn\(\n",
    # PyTorch, where a matrix product is what autograd's thread calls first: in a pipeline.
    r".*there was no current CUDA context! .*\n",
]


def missing_packages():
    """Returns the packages of Debian that slurm/pocket-cluster needs and that are not there."""
    tools = {"slurmctld": "slurm-wlm", "munged": "munge", "ip": "iproute2"}
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    return [package for tool, package in tools.items() if not shutil.which(tool, path=path)]


class Expected:
    """What a job of the series is expected to do."""

    def succeeds(self):
        assert self.wait() == 0, self.output
        output = re.sub("|".join(KNOWN_WARNINGS), "", self.output)
        assert "warn" not in output.lower(), output
        return output

    def fails(self, *words):
        """Asserts a failure, a line with all `words`, and no traceback of a script of ours."""
        assert self.wait() not in (0, None), self.output
        lines = self.output.splitlines()
        assert any(all(word in line for word in words) for line in lines), self.output
        # torchrun prints a traceback of its own; none may come from a script.
        assert not re.search(rf'File "{ROOT}/{SCRIPT_PATH}", line', self.output), self.output


class Job(Expected, jobs.Job):
    """A started command, in which scripts are named as a reader names them, from the root."""

    def __init__(self, command, *args, **options):
        command = re.sub(rf"(?<=\s)({SCRIPT_PATH})(?!\S)", rf"{shlex.quote(str(ROOT))}/\1", command)
        super().__init__(command, *args, **options)

    def workers(self):
        """Returns the process ids of the ranks that this torchrun has started, by local rank."""
        return {
            int(variables["LOCAL_RANK"]): pid
            for pid, variables in self.processes().items()
            if "LOCAL_RANK" in variables
        }

    def torchrun(self):
        """Returns the process id of this job's torchrun."""
        (pid,) = (
            pid
            for pid in self.processes()
            if b"/torchrun\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return pid


class Ranks(Expected, jobs.Ranks):
    """The ranks of a script, which is named in the same way."""

    def __init__(self, command, *args, **options):
        script, *arguments = shlex.split(command)
        super().__init__(shlex.join([str(ROOT / script), *arguments]), *args, **options)


class Shell(jobs.Shell):
    """Starts these jobs in a folder of theirs, and ends what is left of them."""

    job, ranks_job = Job, Ranks

    def run(self, command, **variables):
        return self.start(command, **variables).succeeds()
