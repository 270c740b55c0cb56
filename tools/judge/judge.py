"""How a script is run and judged, and the checks that all kinds of stages have.

A check is a method, check_NAME, which raises WrongError: docs/check.md explains each. What differs
between the kinds stands in toy.py, shards.py and gpt.py.
"""

import functools
import math
import re
import shlex
import tempfile
from collections import Counter
from pathlib import Path

from rankcheck.launch.jobs import STARTUP, free_port, pretend_gpus
from rankcheck.launch.run import start_observed

from tools.judge.run import Run, WrongError, require
from tools.judge.stages import ELASTIC, EPOCHS, PYTHON
from tools.launch.jobs import Shell
from tools.launch.snapshots import load, max_abs_diff

PROBE = Path(__file__).with_name("probe.py")
NOT_FINITE = "are NaN or infinite: is the learning rate too high, or the loss wrong?"


class Judge:
    """A script that should be that of a stage.

    Of what is right, a kind says dataset_size, right_weights of a run, right_loss of an epoch with
    its loss_tolerance, and what is wrong_start if the first weights are not those of `whole`.
    """

    forks = False  # without any launcher, where a check does not need one: faster, less true
    nodes = ()  # where the ranks of the first run are forked, if not all in one folder
    read_snapshot = staticmethod(load)

    def __init__(self, stage, file, task, folder):
        self.stage = stage
        self.file = file.resolve()
        self.task = task
        self.folder = folder
        self.shell = Shell(folder, as_in_life=True)
        self.variables = {"PROBE_OWN_WEIGHTS": "1"} if stage.own_weights else {}
        self.variables |= {"PYTHONPATH": str(STARTUP), "STARTUP_OBSERVER": str(PROBE)}
        self.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/errors.md

    def run(self, total, snapshot, more="", save_every=1, launchers=(), nodes=(), gpus=0, **probe):
        """Trains a few epochs; without launchers, only the ranks start, which is faster."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        variables = self.variables | (pretend_gpus(gpus) if gpus else {})
        variables |= {f"PROBE_{name.upper()}": str(value) for name, value in probe.items()}
        variables["WITNESS_FOLDER"] = str(folder)
        options = f"{total} {save_every} --snapshot_path {snapshot} {self.stage.options} {more}"
        starts_its_ranks = self.stage.launchers == PYTHON and self.stage.processes > 1
        if launchers or (starts_its_ranks and not self.forks):
            commands = [f"{name} {shlex.quote(str(self.file))}" for name in launchers or PYTHON]
            run = self.launch(commands, options, variables, folder)
            if "EADDRINUSE" in run.output:  # another process took the port that was free
                run = self.launch(commands, options, variables, folder)
            return run
        nodes = ["."] if starts_its_ranks else nodes or ["."] * self.stage.processes
        nodes = [self.folder / node for node in nodes]
        launcher = self.stage.launchers[0].split()[0]
        job = start_observed(self.shell, nodes, self.file, PROBE, options, launcher, **variables)
        return self.watch([job], folder)

    def launch(self, commands, options, variables, folder):
        port = free_port()
        commands = [f"{command.format(port=port)} {options}" for command in commands]
        return self.watch([self.shell.start(each, **variables) for each in commands], folder)

    def watch(self, jobs, folder):
        run = Run(self.stage.same_samples, jobs, folder, self.file)
        if run.failures:
            raise WrongError(f"This check itself fails, in {run.failures[0][1]}: please report it.")
        return run

    @functools.cached_property
    def straight(self):
        if not self.forks:
            return self.run(EPOCHS, "straight", launchers=self.stage.launchers)
        return self.run(EPOCHS, self.folder / "straight", nodes=self.nodes)

    @functools.cached_property
    def epoch_steps(self):
        return len(self.straight.steps[0]) // EPOCHS

    @functools.cached_property
    def first_epoch(self):
        return self.run(1, "first")

    @property
    def whole(self):
        """Returns a run in which rank 0 has all weights, and begins with the right ones."""
        return self.straight

    def load(self, snapshot):
        try:
            return self.read_snapshot(self.folder / snapshot)
        except Exception as error:
            raise WrongError(f"Its snapshot cannot be loaded: {error!r:.300}") from error

    def weights(self, snapshot):
        return list(self.load(snapshot)["model"].values())

    def sum_of_weights(self, step):
        """Returns the sum of the weights before a step, of which each rank may have a part."""
        ranks = [steps[step] for steps in self.straight.steps]
        if self.stage.same_samples:  # of some weights, all ranks have copies
            total = 0
            for number, (size, _) in enumerate(self.whole.steps[0][0]["parts"]):
                parts = [rank["parts"][number] for rank in ranks]
                copies = round(sum(held for held, _ in parts) / size)
                total += sum(part for _, part in parts) / copies
            return total
        held = self.whole.steps[0][0]["held"]
        copies = round(sum(rank["held"] for rank in ranks) / held)  # shards may have padding
        return sum(rank["weights"] for rank in ranks) / copies

    def compare(self, what, snapshot, weights=None):
        """Raises WrongError if the weights of a snapshot differ from `weights`, or the run's."""
        found = self.weights(snapshot)
        finite = all(tensor.isfinite().all() for tensor in found)
        require(finite, f"{what}: the weights {NOT_FINITE}")
        diff = max_abs_diff(found, weights or self.weights("straight"))
        message = f"{what}: the weights differ by up to {diff:.2g}, which is not rounding."
        require(diff <= self.stage.max_diff, message)

    def check_starts(self):
        message = "The run failed."
        if self.stage.launchers == ELASTIC and self.straight.steps:
            full, left = divmod(self.dataset_size, self.stage.batch)
            if left and min(map(len, self.straight.steps)) == full:
                message += f" Is a rank's shard empty where the last batch has {left} samples?"
        for _, text, place in self.straight.differences():
            message += f" In line {place.rpartition(':')[2]}: {text}."
        self.straight.require(self.straight.succeeded, message)
        self.straight.require(self.straight.steps, "No step of an optimizer was seen.")

    def check_processes(self):
        sizes = [steps[0]["world_size"] for steps in self.straight.steps]
        message = f"{len(sizes)} processes trained, in process groups of {sizes}."
        require(sizes == [self.stage.processes] * self.stage.processes, message)

    def check_names(self):
        again = [self.first_epoch] if "seed" in self.stage.checks else []
        for _, text, place in self.straight.differences(*again):
            raise WrongError(f"In line {place.rpartition(':')[2]}: {text}.")

    def check_batch(self):
        sizes = {len(batch) for batch in self.straight.batches()[: self.epoch_steps - 1]}
        message = f"The ranks' steps together take {sizes} samples, not {self.stage.batch}."
        require(sizes == {self.stage.batch}, message)

    def check_samples(self):
        self.count_samples(self.straight)
        if "gpus" in self.stage.checks and self.on_gpus[0].succeeded:
            self.count_samples(self.on_gpus[0])

    def count_samples(self, run):
        """Raises WrongError unless each epoch has taken each sample once."""
        if self.stage.same_samples:
            for number, ranks in enumerate(zip(*run.steps, strict=False), 1):
                same = all(step["samples"] == ranks[0]["samples"] for step in ranks)
                require(same, f"In step {number}, the ranks take different samples.")
        processes = len(run.steps)
        epoch_steps = len(run.steps[0]) // EPOCHS
        for first in range(0, EPOCHS * epoch_steps, epoch_steps):
            counts = Counter()
            for batch in run.batches()[first : first + epoch_steps]:
                counts.update(batch)
            size = self.dataset_size
            require(
                len(counts) == size and counts.total() < size + processes,
                f"An epoch on {processes} processes took {counts.total()} samples,"
                f" {len(counts)} of them different, of a data set of {size}.",
            )

    def check_order(self):
        steps = self.straight.steps[0]
        differ = steps[0]["samples"] != steps[self.epoch_steps]["samples"]
        require(differ, "Epochs 1 and 2 begin with the same samples in the same order.")

    def check_weights(self):
        for number, ranks in enumerate(zip(*self.straight.steps, strict=True)):
            finite = all(math.isfinite(step["weights"]) for step in ranks)
            require(finite, f"After {number} steps, the weights {NOT_FINITE}")
            training = all(step["training"] for step in ranks)
            require(training, f"In step {number + 1}, the model is in eval mode.")
            wrapped_once = all(step["wrappers"] <= 1 for step in ranks)
            require(wrapped_once, "DDP wraps a model that DDP has wrapped already.")
            self.compare_ranks(number, ranks)
        self.compare_start()
        weights = self.right_weights(self.straight)
        self.compare("Beside one process that takes the same batches", "straight", weights)

    def compare_ranks(self, number, ranks):
        """Raises WrongError if what the ranks have after so many steps does not fit together."""

    def compare_start(self):
        """Raises WrongError unless training begins with the right weights."""
        difference = self.sum_of_weights(0) - self.whole.steps[0][0]["weights"]
        require(abs(difference) <= 1e-6, f"Before the first step, the {self.wrong_start}")

    def check_loss(self):
        for epoch in range(1, EPOCHS + 1):
            self.compare_loss(self.straight, epoch, self.right_loss(epoch))

    def compare_loss(self, run, epoch, expected):
        """Raises WrongError if a run logs another loss of an epoch than `expected`."""
        found = run.losses().get(epoch, math.nan)
        tolerance = max(self.loss_tolerance, self.stage.max_diff)
        if not abs(found / expected - 1) <= tolerance:
            message = f"Epoch {epoch}: it logs {found}, not {expected:.4g}."
            for factor in (self.stage.processes, 1 / self.stage.processes):
                if factor != 1 and abs(found / expected / factor - 1) <= tolerance:
                    message += f" This is {factor:g} times the right one: how is it averaged?"
            raise WrongError(message)

    def check_save(self):
        saving = {event["rank"] for event in self.straight.events if "saved" in event}
        require(saving == {0}, f"Ranks {sorted(saving)} save.")

    def check_log(self):
        for start, pattern in (
            ("0 of 3 epochs done", r"^\d+ of \d+ epochs done.*"),
            ("epoch 1 |", r"^epoch 1(?: \+ 0 samples)? \|.*"),
        ):
            lines = re.findall(pattern, self.straight.output, re.M)
            require(lines, f"No line begins as {start!r}.")
            message = [f"This is logged {len(lines)} times:", *lines]
            require(len(lines) == 1, "\n| ".join(message))

    @functools.cached_property
    def on_gpus(self):
        return self.run_on_gpus(EPOCHS)

    @property
    def can_resume(self):
        """Returns whether it resumes on CPUs; if not, another check says so."""
        return True

    @property
    def gpu_nodes(self):
        """Returns the node of each process of a run on pretended GPUs."""
        return ["."] * self.stage.processes

    def run_on_gpus(self, total):
        """Returns a run on pretended GPUs, and the GPU that each of its processes should use."""
        nodes = self.gpu_nodes
        run = self.run(total, self.folder / "gpus", nodes=nodes, gpus=nodes.count(nodes[0]))
        return run, [f"cuda:{nodes[:rank].count(node)}" for rank, node in enumerate(nodes)]

    def check_device(self):
        run, expected = self.on_gpus
        run.succeed()
        used = sorted(steps[0]["device"] for steps in run.steps)
        message = f"The ranks' models are on {used}, not on {sorted(expected)}."
        require(used == sorted(expected), message)
        message = "They end without destroy_process_group, of which NCCL warns."
        require(not run.stay_in_group(), message)
        self.compare("On GPUs, beside a CPU", "gpus", self.right_weights(run))
        if self.can_resume:
            resumed = self.run_on_gpus(EPOCHS + 1)[0]
            message = "On GPUs, it fails when resumed: is the optimizer's state on the CPU?"
            resumed.require(resumed.succeeded, message)

    def check_signal(self):
        step = self.epoch_steps + 3
        every = "--save_every_steps 100000 --num_workers 1"
        # With step_s, a script that looks for signals once in a second does so in each step.
        stopped = self.run(EPOCHS, "stopped", every, rank=0, step=step, signal=15, step_s=1)
        stopped.require(all(stopped.values("handled")), "SIGTERM has no handler.")
        message = "SIGTERM reaches data workers: os.setsid?"
        stopped.require(not any(stopped.values("reaches_workers")), message)
        message = "A rank has stopped, and another fails in a collective."
        stopped.require("gloo/" not in stopped.output, message)
        taken = len(stopped.batches())
        message = f"SIGTERM came in step {step}, and training stopped after step {taken}."
        stopped.require(step < taken < 2 * self.epoch_steps, message)
        self.compare_resumed(stopped, "stopped", taken, every, f"Stopped after {taken} steps")

    def compare_resumed(self, run, snapshot, taken, options, what):
        """Raises WrongError unless a run that ended within an epoch resumes after steps `taken`."""
        run.require((self.folder / snapshot).exists(), "It has not saved.")
        self.keep_newer(snapshot, taken)
        resumed = self.run(EPOCHS, snapshot, options)
        resumed.succeed_after(EPOCHS * self.epoch_steps - taken, f"{what}, and started again")
        self.compare(f"{what} and resumed, and not interrupted", snapshot)
        self.compare_loss(resumed, 2, self.straight.losses().get(2, math.nan))

    def keep_newer(self, snapshot, steps):
        """Keeps a snapshot after so many steps, for checks of nodes with different ones."""

    def check_state(self):
        size = sum(tensor.numel() for tensor in self.weights("straight"))
        held = [steps[0]["held"] for steps in self.straight.steps]
        message = f"Of {size} parameters, the ranks' optimizers have {held}."
        require(max(held) <= 0.6 * size, message)

    def check_sharded(self):
        self.check_state()
        size = sum(tensor.numel() for tensor in self.weights("straight"))
        gathered = max(self.straight.values("gathered"))
        message = f"A rank holds a part of the {size} parameters, but gathers {gathered} at once."
        require(gathered <= self.stage.max_gathered * size, message)
