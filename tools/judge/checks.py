"""The checks of `make check`: a method each, which raises WrongError.

The weights must be those of a plain loop over the same batches, or of a file of ours on one
process. docs/check.md explains each check.
"""

import functools
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from rankcheck.launch.jobs import STARTUP, free_port, pretend_gpus
from rankcheck.launch.run import SILENCE_S, start_observed
from rankcheck.witness import hashes
from torch import nn

import singlegpu
from tools.judge.run import Run, WrongError
from tools.judge.stages import (
    CHUNKS,
    ELASTIC,
    EPOCHS,
    FIRST,
    GPT_OPTIONS,
    NEEDED,
    PYTHON,
    RESTARTING,
    STAGES,
    TORCHRUN,
    VAL_CHUNKS,
)
from tools.launch.jobs import Shell
from tools.launch.snapshots import load, load_gpt, max_abs_diff, write_text
from tools.steps import ROOT
from tools.steps import STAGES as CHAIN

PROBE = ROOT / "tools" / "judge" / "probe.py"
NOT_FINITE = "are NaN or infinite: is the learning rate too high, or the loss wrong?"


def toy_task():
    """Returns what singlegpu.py trains: model, data set, loss function, optimizer."""
    model = singlegpu.ToyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, singlegpu.ToyDataset(2048), nn.MSELoss(), optimizer


class Judge:
    """A method per check, which raises WrongError, of a script that should be that of a stage."""

    silence_s = SILENCE_S
    forks = False  # without any launcher, where a check does not need one: faster, less true

    def __init__(self, stage, file, task, folder):
        self.stage = stage
        self.file = file.resolve()
        self.task = task
        self.folder = folder
        self.shell = Shell(folder, as_in_life=True)
        write_text(folder / "text", VAL_CHUNKS + CHUNKS, 8)

    def run(self, total, snapshot, more="", save_every=1, launchers=(), nodes=(), gpus=0, **probe):
        """Trains a few epochs; without launchers, only the ranks start, which is faster."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        variables = pretend_gpus(gpus) if gpus else {}
        variables |= {"WITNESS_FOLDER": str(folder), "PYTHONPATH": str(STARTUP)}
        variables["STARTUP_OBSERVER"] = str(PROBE)
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/hangs.md
        variables |= {f"PROBE_{name.upper()}": str(value) for name, value in probe.items()}
        if self.stage.reference:
            variables["PROBE_FLOAT64"] = "1"
        if self.stage.own_weights:
            variables["PROBE_OWN_WEIGHTS"] = "1"
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

    def watch(self, jobs, folder):
        more = {"silence_s": self.silence_s, "same_samples": self.stage.same_samples}
        run = Run(jobs, folder, self.file, **more)
        if run.failures:
            raise WrongError(f"This check itself fails, in {run.failures[0][1]}: please report it.")
        return run

    def launch(self, commands, options, variables, folder):
        port = free_port()
        jobs = [
            self.shell.start(f"{command.format(port=port)} {options}", **variables)
            for command in commands
        ]
        return self.watch(jobs, folder)

    @functools.cached_property
    def straight(self):
        if not self.forks:
            return self.run(EPOCHS, "straight", launchers=self.stage.launchers)
        nodes = []
        if len(self.stage.launchers) > 1 and not self.stage.reference:
            nodes = ["node1", "node2"]  # each rank has local rank 0, as where torchrun starts them
        return self.run(EPOCHS, self.folder / "straight", nodes=nodes)

    @functools.cached_property
    def epoch_steps(self):
        return len(self.straight.steps[0]) // EPOCHS

    @functools.cached_property
    def alone(self):
        """Returns a run of the script on one process, which has all shards."""
        run = self.run(1, "alone", nodes=["."])
        run.require(run.succeeded and run.steps, "On one process, it fails.")
        return run

    def initial(self, model):
        """Returns the weights that training began with: the first rank's, if ranks have shards."""
        weights = torch.load((self.alone if self.stage.shards else self.straight).initial)
        if [len(w.flatten()) for w in weights] != [p.numel() for p in model.parameters()]:
            raise WrongError(f"The optimizer has {len(weights)} tensors, not one for each weight.")
        return weights

    def train(self, batches):
        """Trains in a plain loop, from the weights that the run began with, on these batches.

        Returns the model, the optimizer, and the sum of the losses of each batch.
        """
        model, dataset, loss_fn, optimizer = self.task()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), self.initial(model), strict=True):
                parameter.copy_(value.view_as(parameter))
        losses = []
        for batch in batches:
            samples = [dataset[self.indices[sample]] for sample in batch]
            inputs, targets = (torch.stack(tensors) for tensors in zip(*samples, strict=True))
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(batch))
        return model, optimizer, losses

    @functools.cached_property
    def indices(self):
        """Returns, by the hash of a sample, its index in the data set."""
        dataset = self.task()[1]
        return {hashes(dataset[i][0][None])[0]: i for i in range(len(dataset))}

    @functools.cached_property
    def plain_loop(self):
        return self.train(self.straight.batches())

    @functools.cached_property
    def one_process(self):
        """Returns the run of the reference, on one process."""
        stage = self.stage._replace(options=f"{GPT_OPTIONS} --batch_size 16")
        one = Judge(stage, ROOT / self.stage.reference, None, self.folder)
        one.shell = self.shell  # which ends what it has started
        run = one.run(EPOCHS, "reference", nodes=["."])
        run.succeed()
        return run

    def load(self, snapshot):
        try:
            read = load_gpt if self.stage.reference else load
            return read(self.folder / snapshot)
        except Exception as error:
            raise WrongError(f"Its snapshot cannot be loaded: {error!r:.300}") from error

    @functools.cached_property
    def reference(self):
        """Returns the weights that are right after the batches of the run."""
        if not self.stage.reference:
            return list(self.plain_loop[0].parameters())
        drawn = self.one_process.steps[0][0]["weights"]
        found = self.sum_of_weights(0, self.one_process)
        if "sharded" in self.stage.checks and abs(drawn - found) > 1e-6:
            raise WrongError(
                "Before the first step, the weights are others than on one process: a rank that"
                ' draws its shard alone draws other numbers. Read "Sharding the model"'
                " (docs/gpt/fsdp.md)."
            )
        return self.weights("reference")

    def sum_of_weights(self, step, whole):
        """Returns the sum of the weights before a step, of which `whole`, a run, has all."""
        ranks = [steps[step] for steps in self.straight.steps]
        if self.stage.same_samples:  # of some weights, all ranks have copies
            total = 0
            for number, (size, _) in enumerate(whole.steps[0][0]["parts"]):
                parts = [rank["parts"][number] for rank in ranks]
                copies = round(sum(held for held, _ in parts) / size)
                total += sum(part for _, part in parts) / copies
            return total
        held = whole.steps[0][0]["held"]
        copies = round(sum(rank["held"] for rank in ranks) / held)  # shards may have padding
        return sum(rank["weights"] for rank in ranks) / copies

    def weights(self, snapshot):
        """Returns the weights of a snapshot; folders of shards have no order, so by name."""
        model = self.load(snapshot)["model"]
        return [model[name] for name in (sorted(model) if self.stage.reference else model)]

    def compare(self, what, snapshot, weights=None):
        """Raises WrongError if the weights of a snapshot differ from `weights`, or the run's."""
        found = self.weights(snapshot)
        if not all(tensor.isfinite().all() for tensor in found):
            raise WrongError(f"{what}: the weights {NOT_FINITE}")
        diff = max_abs_diff(found, weights or self.weights("straight"))
        if not diff <= self.stage.max_diff:
            raise WrongError(
                f"{what}: the weights differ by up to {diff:.2g}, which is not rounding."
            )

    # The checks, in their order

    def check_starts(self):
        message = "The run failed."
        if self.stage.launchers == ELASTIC and self.straight.steps:
            full, left = divmod(len(self.indices), self.stage.batch)
            if left and min(map(len, self.straight.steps)) == full:
                message += f" Is a rank's shard empty where the last batch has {left} samples?"
        message += "".join(
            f" In line {place.rpartition(':')[2]}: {text}."
            for _, text, place in self.straight.differences()
        )
        self.straight.require(self.straight.succeeded, message)
        self.straight.require(self.straight.steps, "No step of an optimizer was seen.")

    def check_processes(self):
        sizes = [steps[0]["world_size"] for steps in self.straight.steps]
        if sizes != [self.stage.processes] * self.stage.processes:
            raise WrongError(f"{len(sizes)} processes trained, in process groups of {sizes}.")

    def check_names(self):
        again = [self.first_epoch] if "seed" in self.stage.checks else []
        for _, text, place in self.straight.differences(*again):
            raise WrongError(f"In line {place.rpartition(':')[2]}: {text}.")

    def check_batch(self):
        sizes = {len(batch) for batch in self.straight.batches()[: self.epoch_steps - 1]}
        if sizes != {self.stage.batch}:
            raise WrongError(
                f"The ranks' steps together take {sizes} samples, not {self.stage.batch}."
            )

    def check_samples(self):
        self.count_samples(self.straight)
        if "gpus" in self.stage.checks and self.on_gpus[0].succeeded:
            self.count_samples(self.on_gpus[0])

    def count_samples(self, run):
        """Raises WrongError unless each epoch has taken each sample once."""
        if self.stage.same_samples:
            for number, ranks in enumerate(zip(*run.steps, strict=False), 1):
                if any(step["samples"] != ranks[0]["samples"] for step in ranks):
                    raise WrongError(f"In step {number}, the ranks take different samples.")
        size = CHUNKS if self.stage.reference else len(self.indices)
        processes = len(run.steps)
        epoch_steps = len(run.steps[0]) // EPOCHS
        for first in range(0, EPOCHS * epoch_steps, epoch_steps):
            counts = Counter()
            for batch in run.batches()[first : first + epoch_steps]:
                counts.update(batch)
            if len(counts) != size or counts.total() >= size + processes:
                raise WrongError(
                    f"An epoch on {processes} processes took {counts.total()} samples,"
                    f" {len(counts)} of them different, of a data set of {size}."
                )
            if not self.stage.reference and counts.keys() - self.indices.keys():
                raise WrongError("Some samples are not in the data set.")

    def check_order(self):
        steps = self.straight.steps[0]
        if steps[0]["samples"] == steps[self.epoch_steps]["samples"]:
            raise WrongError("Epochs 1 and 2 begin with the same samples in the same order.")

    def check_weights(self):
        for number, ranks in enumerate(zip(*self.straight.steps, strict=True)):
            weights = {step["weights"] for step in ranks}
            if not all(map(math.isfinite, weights)):
                raise WrongError(f"After {number} steps, the weights {NOT_FINITE}")
            if not all(step["training"] for step in ranks):
                raise WrongError(f"In step {number + 1}, the model is in eval mode.")
            if any(step["wrappers"] > 1 for step in ranks):
                raise WrongError("DDP wraps a model that DDP has wrapped already.")
            if self.stage.shards and any(step["running"] for step in ranks):
                raise WrongError("The optimizer steps before each reduce-scatter has ended.")
            if len(weights) > 1 and not (self.stage.reference or self.stage.shards):
                message = f"After {number} steps, the ranks have different weights."
                if number == 0:
                    message += " All must begin with those of rank 0."
                if any(step["running"] for step in self.straight.steps[0]):
                    message += " The optimizer steps before each all-reduce has been waited for."
                raise WrongError(message)
            if len({step["state"] for step in ranks}) > 1 and not (
                self.stage.reference or self.stage.shards
            ):
                message = f"After {number} steps, the ranks' optimizers have different states."
                raise WrongError(f"{message} Are the weights averaged, and not the gradients?")
        if self.stage.shards:
            drawn = self.alone.steps[0][0]["weights"]
            if abs(self.sum_of_weights(0, self.alone) - drawn) > 1e-6:
                raise WrongError("Before the first step, the shards are not of rank 0's weights.")
        if self.stage.processes > 1 and not self.stage.reference:
            self.compare_first_update()
        self.compare("Beside one process that takes the same batches", "straight", self.reference)

    def compare_first_update(self):
        """Raises WrongError if it is n times the right one, or 1/n, on n processes."""
        whole = self.alone if self.stage.shards else self.straight
        before, after = (self.sum_of_weights(step, whole) for step in range(2))
        parameters = self.train(self.straight.batches()[:1])[0].parameters()
        expected = sum(parameter.double().sum().item() for parameter in parameters)
        ratio = (after - before) / (expected - before)
        for wrong, why in (
            (1 / self.stage.processes, "are the gradients averaged twice?"),
            (self.stage.processes, "are the gradients summed, or is the rate multiplied by it?"),
        ):
            if abs(ratio / wrong - 1) < 0.01:
                raise WrongError(f"The first update is {wrong:g} times the right one: {why}")

    def check_loss(self):
        for epoch in range(1, EPOCHS + 1):
            if self.stage.reference:
                expected = self.one_process.losses()[epoch]
            else:
                batches = slice((epoch - 1) * self.epoch_steps, epoch * self.epoch_steps)
                samples = sum(map(len, self.straight.batches()[batches]))
                expected = sum(self.plain_loop[2][batches]) / samples
            self.compare_loss(self.straight, epoch, expected)
        if self.stage.reference:
            runs = self.straight, self.one_process
            found, expected = (re.findall(r"^val loss ([^\s,]+)", r.output, re.M) for r in runs)
            if found != expected:
                raise WrongError(f"It logs val losses of {found}, not {expected}.")

    def compare_loss(self, run, epoch, expected):
        """Raises WrongError if a run logs another loss of an epoch than `expected`."""
        found = run.losses().get(epoch, math.nan)
        tolerance = 1e-4 if self.stage.reference else max(2e-3, self.stage.max_diff)
        if not abs(found / expected - 1) <= tolerance:
            message = f"Epoch {epoch}: it logs {found}, not {expected:.4g}."
            for factor in (self.stage.processes, 1 / self.stage.processes):
                if factor != 1 and abs(found / expected / factor - 1) <= tolerance:
                    message += f" This is {factor:g} times the right one: how is it averaged?"
            raise WrongError(message)

    def check_save(self):
        saving = {event["rank"] for event in self.straight.events if "saved" in event}
        if saving != {0}:
            raise WrongError(f"Ranks {sorted(saving)} save.")

    def check_log(self):
        lines_of = {
            "0 of 3 epochs done": r"^\d+ of \d+ epochs done.*",
            "epoch 1 |": r"^epoch 1(?: \+ 0 samples)? \|.*",
        }
        for start, pattern in lines_of.items():
            lines = re.findall(pattern, self.straight.output, re.M)
            if not lines:
                raise WrongError(f"No line begins as {start!r}.")
            if len(lines) != 1:
                raise WrongError("\n| ".join([f"This is logged {len(lines)} times:", *lines]))

    def check_snapshot(self):
        model, _, _, optimizer = self.task()
        snapshot = self.load("straight")
        try:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            epochs = snapshot["epochs_run"]
        except Exception as error:
            raise WrongError(
                f"The stage before cannot load its snapshot: {error!r:.300}"
            ) from error
        if epochs != EPOCHS:
            raise WrongError(f"After {EPOCHS} epochs it holds epochs_run {epochs}.")
        if self.plain_loop[1].state and not optimizer.state:
            raise WrongError("The optimizer's state in it is empty: is it that of another one?")

    @functools.cached_property
    def first_epoch(self):
        return self.run(1, "first")

    @functools.cached_property
    def resumed(self):
        self.first_epoch.succeed()
        shutil.copy(self.folder / "first", self.folder / "resumed")
        return self.run(EPOCHS, "resumed", save_every=2)

    def check_seed(self):
        self.first_epoch.succeed()
        self.first_epoch.require(self.first_epoch.steps, "It has made no step.")
        self.first_epoch.require((self.folder / "first").exists(), "It has not saved.")
        first, again = self.straight.steps[0][0], self.first_epoch.steps[0][0]
        for what in ("weights", "samples"):
            if first[what] != again[what]:
                raise WrongError(f"Two runs begin with different {what}: is there no seed?")

    def check_dropout(self):
        for number, ranks in enumerate(zip(*self.straight.steps, strict=False), 1):
            if len({step["random_state"] for step in ranks}) < len(ranks):
                raise WrongError(f"In step {number}, two ranks draw the same random numbers.")

    def check_resume(self):
        self.resumed.succeed()
        found = len(self.resumed.batches())
        expected = (EPOCHS - 1) * self.epoch_steps
        if found != expected:
            raise WrongError(
                f"Started again after 1 of {EPOCHS} epochs: {found} steps, not {expected}."
            )
        first, second = (self.straight.batches()[n * self.epoch_steps] for n in (0, 1))
        if sorted(self.resumed.batches()[0]) == sorted(first) != sorted(second):
            raise WrongError("Resumed in epoch 2, it takes the samples in epoch 1's order.")
        saved = self.load("resumed").get("epochs_run")
        if saved != EPOCHS:
            raise WrongError(f"Saving every 2 epochs, it ends after {EPOCHS}, and saved {saved}.")
        self.compare("Resumed after epoch 1, and not interrupted", "resumed")
        finished = self.run(EPOCHS, "resumed")
        finished.succeed()
        if finished.steps:
            raise WrongError(f"Started again when all {EPOCHS} epochs are done, it trains on.")

    def check_previous(self):
        batches = self.straight.batches()
        model, optimizer, _ = self.train(batches[: self.epoch_steps])
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1},
            self.folder / "previous",
        )
        run = self.run(2, "previous")
        run.succeed()
        found = len(run.batches())
        if found != self.epoch_steps:
            raise WrongError(f"From a snapshot of epoch 1 to epoch 2: {found} steps.")
        batches = batches[: self.epoch_steps] + run.batches()
        self.compare("Resumed from it", "previous", list(self.train(batches)[0].parameters()))

    @functools.cached_property
    def on_gpus(self):
        return self.run_on_gpus(EPOCHS)

    def run_on_gpus(self, total):
        """Returns a run on pretended GPUs, and the GPU that each of its processes should use."""
        count = self.stage.processes
        if count > 1 and not (self.stage.reference or self.stage.same_samples):
            count = 3  # not a divisor of 2048: some samplers then pad the epoch, or cut it
        if self.stage.launchers in (PYTHON, TORCHRUN) or self.stage.reference:
            run = self.run(total, "gpus", nodes=["."] * count, gpus=count)
            return run, [f"cuda:{n}" for n in range(count)]
        nodes = ["node1", "node1", "node2"]
        run = self.run(total, self.folder / "gpus", nodes=nodes, gpus=2)
        return run, ["cuda:0", "cuda:0", "cuda:1"]

    def check_gpus(self):
        run, expected = self.on_gpus
        bound = run.values("bound")
        run.require({*bound} == {*expected}, f"set_device got {bound}, where {expected} is right.")
        if backends := [name for name in run.values("backend") if "nccl" not in str(name)]:
            raise WrongError(f"On GPUs, the backend is {backends[0]}.")
        if "None" in self.resumed.values("loaded_to"):
            raise WrongError("torch.load has no map_location: all ranks load onto rank 0's GPU.")

    def check_device(self):
        run, expected = self.on_gpus
        run.succeed()
        used = sorted(steps[0]["device"] for steps in run.steps)
        if used != expected:
            raise WrongError(f"The ranks' models are on {used}, not on {expected}.")
        if run.stay_in_group():
            raise WrongError("They end without destroy_process_group, of which NCCL warns.")
        weights = self.reference
        if not self.stage.reference:  # there may be more processes than on the CPU
            weights = list(self.train(run.batches())[0].parameters())
        self.compare("On GPUs, beside a CPU", "gpus", weights)
        if not self.stage.reference and not self.resumed.succeeded:  # see `resume`
            return
        resumed = self.run_on_gpus(EPOCHS + 1)[0]
        resumed.require(
            resumed.succeeded,
            "On GPUs, it fails when resumed: is the optimizer's state on the CPU?",
        )

    def check_restart(self):
        step = 2 * self.epoch_steps + 8
        more = "--save_every_steps 5" if self.stage.saves_steps else ""
        run = self.run(EPOCHS, "killed", more, launchers=RESTARTING, rank=1, step=step, signal=9)
        run.succeed()
        resumed_at = EPOCHS * self.epoch_steps - min(map(len, run.steps))
        if step - resumed_at > (5 if more else 8):
            raise WrongError(f"Killed after {step} steps, it resumed after {resumed_at}. {more}")
        self.compare("Killed in epoch 3 and restarted, and not killed", "killed")

    def on_own_disks(self, total, newer):
        """Returns a run on two nodes with different snapshots, the second of them newer."""
        self.first_epoch.succeed()
        for node, snapshot in (("node1", "first"), ("node2", newer)):
            (self.folder / node).mkdir(exist_ok=True)
            shutil.copy(self.folder / snapshot, self.folder / node / "disks")
        return self.run(total, "disks", nodes=["node1", "node2"])

    def check_newest(self):
        run = self.on_own_disks(EPOCHS, "newer")
        run.succeed()
        found, expected = len(run.batches()), EPOCHS * self.epoch_steps - self.newer_steps
        if found != expected:
            message = f"One node's snapshot is newer, and it takes {found} steps, not {expected}:"
            raise WrongError(f"{message} it does not resume from the newest.")
        self.compare("Resumed where the other node had the newer snapshot", "node1/disks")

    def check_disks(self):
        newer = "newer" if self.stage.saves_steps else "straight"
        run = self.on_own_disks(EPOCHS + 1, newer)
        run.require(not run.steps, "The snapshot of one node is newer, and they train.")
        run.require(all(run.statuses), "They do not train, but end with status 0.")
        run.require(
            "RuntimeError" not in run.output, "One ends, and the other fails in a collective."
        )

    def check_steps(self):
        step = self.epoch_steps + 8
        every = "--save_every_steps 5 --num_workers 1"
        killed = self.run(EPOCHS, "steps", every, rank=0, step=step, signal=9)
        killed.require((self.folder / "steps").exists(), "It has not saved.")
        shutil.copy(self.folder / "steps", self.folder / "newer")
        self.newer_steps = step // 5 * 5  # that it holds
        resumed = self.run(EPOCHS, "steps", every)
        resumed.succeed()
        found = len(resumed.batches())
        expected = EPOCHS * self.epoch_steps - step // 5 * 5
        if found != expected:
            raise WrongError(
                f"Killed after {step} steps with --save_every_steps 5, and started again, it took"
                f" {found} steps, not {expected}."
            )
        self.compare("Killed within an epoch and resumed, and not killed", "steps")
        self.compare_loss(resumed, 2, self.straight.losses().get(2, math.nan))

    def check_signal(self):
        step = self.epoch_steps + 3
        every = "--save_every_steps 100000 --num_workers 1"
        # With step_s, a script that looks for signals once in a second does so in each step.
        stopped = self.run(EPOCHS, "stopped", every, rank=0, step=step, signal=15, step_s=1)
        for wrong, message in (
            (False in stopped.values("handled"), "SIGTERM has no handler."),
            (True in stopped.values("reaches_workers"), "SIGTERM reaches data workers: os.setsid?"),
            ("gloo/" in stopped.output, "A rank has stopped, and another fails in a collective."),
        ):
            stopped.require(not wrong, message)
        stopped.require((self.folder / "stopped").exists(), "It has not saved.")
        if not self.stage.reference:
            shutil.copy(self.folder / "stopped", self.folder / "newer")
            self.newer_steps = len(stopped.batches())
        resumed = self.run(EPOCHS, "stopped", every)
        resumed.succeed()
        steps = [len(stopped.batches()), len(resumed.batches())]
        total = EPOCHS * self.epoch_steps
        stopped.require(
            sum(steps) == total and step < steps[0] < 2 * self.epoch_steps,
            f"SIGTERM came in step {step} of {total}: it took {steps[0]} steps, and {steps[1]} when"
            " started again.",
        )
        self.compare("Stopped within an epoch and resumed, and not stopped", "stopped")
        self.compare_loss(resumed, 2, self.straight.losses().get(2, math.nan))

    def check_node(self):
        step = self.epoch_steps + 8
        every = "--save_every_steps 5"
        last = {"rank": "last_node", "step": step, "signal": 9}
        run = self.run(EPOCHS, "node", every, launchers=ELASTIC, **last)
        run.require(run.statuses[:1] == [0], "A node failed, and the other did not finish.")
        repeated = sum(map(len, run.steps)) - (step + 1) - EPOCHS * self.epoch_steps
        if repeated > step % 5 + 1:
            raise WrongError(
                f"A node failed, and the other has repeated {repeated} steps, in spite of {every}."
            )
        self.compare("With a node that fails, and without", "node")

    def check_state(self):
        size = sum(tensor.numel() for tensor in self.weights("straight"))
        held = [steps[0]["held"] for steps in self.straight.steps]
        if max(held) > 0.6 * size:
            raise WrongError(f"Of {size} parameters, the ranks' optimizers have {held}.")

    def check_sharded(self):
        self.check_state()
        size = sum(tensor.numel() for tensor in self.weights("straight"))
        gathered = max(self.straight.values("gathered"))
        if gathered > self.stage.max_gathered * size:
            raise WrongError(
                f"A rank holds a part of the {size} parameters, but gathers {gathered} at once."
            )


def explanation(check):
    """Returns the title and the text of a check on docs/check.md, without Markdown."""
    text = (ROOT / "docs" / "check.md").read_text()
    title, body = re.search(rf"^## {check}: (.*)\n\n((?:.+\n)+)", text, re.M).groups()
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
        print(f"\r\033[K{line}", end="\n" if final else "", flush=True)
    elif final:
        print(line, flush=True)


def judge(name, file, task, folder, first="", interrupted=None):
    """Prints what each check of a stage sees; returns the names of those that fail.

    With `first`, it judges this check first, without a launcher where it can, and ends with the
    first one that fails. If `interrupted` says so between two checks, it returns None.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # judged the same everywhere
    judge = Judge(STAGES[name], file, task, folder)
    judge.forks = bool(first)
    width = min(shutil.get_terminal_size((100, 24)).columns, 100) - 6
    failed = []
    try:
        for check in in_order(STAGES[name].checks.split(), first):
            if interrupted and interrupted():
                return None
            title, why = explanation(check)
            if (FIRST | NEEDED.get(check, set())) & {*failed}:
                print(f"  ?   {title}: not judged before what failed is right")
                continue
            show(f"  …   {title}")
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
                    break
        if not failed:
            following = dict(pairwise(CHAIN)).get(f"{name}.py", "").removesuffix(".py")
            hint = f"; next: docs/{following}.md" if following and not first else ""
            print(f"all {len(STAGES[name].checks.split())} checks passed{hint}")
    finally:
        judge.shell.end_all()
    return failed
