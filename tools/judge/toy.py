"""The checks of a script that trains the toy, or a model and data of a reader's own.

Its weights must be those of a plain loop over the same batches.
"""

import functools
import shutil

import torch
from rankcheck.witness import hashes

from tools.judge.judge import Judge
from tools.judge.run import WrongError, require
from tools.judge.stages import ELASTIC, EPOCHS, PYTHON, RESTARTING, TORCHRUN


class ToyJudge(Judge):
    loss_tolerance = 2e-3
    wrong_start = "weights are not those of rank 0."

    @property
    def nodes(self):
        """Returns a node for each rank if torchrun starts it so: each has local rank 0."""
        return ["node1", "node2"] if len(self.stage.launchers) > 1 else []

    @functools.cached_property
    def indices(self):
        """Returns, by the hash of a sample, its index in the data set."""
        dataset = self.task()[1]
        return {hashes(dataset[i][0][None])[0]: i for i in range(len(dataset))}

    @property
    def dataset_size(self):
        return len(self.indices)

    def train(self, batches):
        """Trains in a plain loop, from the weights that the run began with, on these batches.

        Returns the model, the optimizer, and the sum of the losses of each batch.
        """
        model, dataset, loss_fn, optimizer = self.task()
        initial = torch.load(self.whole.initial)
        sizes = [parameter.numel() for parameter in model.parameters()]
        message = f"The optimizer has {len(initial)} tensors, not one for each weight."
        require([len(weight.flatten()) for weight in initial] == sizes, message)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial, strict=True):
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
    def plain_loop(self):
        return self.train(self.straight.batches())

    def right_weights(self, run):
        """Returns the weights of a plain loop over the batches of a run."""
        return list(self.train(run.batches())[0].parameters())

    def right_loss(self, epoch):
        batches = slice((epoch - 1) * self.epoch_steps, epoch * self.epoch_steps)
        samples = sum(map(len, self.straight.batches()[batches]))
        return sum(self.plain_loop[2][batches]) / samples

    def count_samples(self, run):
        super().count_samples(run)
        unknown = set().union(*run.batches()) - self.indices.keys()
        require(not unknown, "Some samples are not in the data set.")

    def compare_ranks(self, number, ranks):
        message = f"After {number} steps, the ranks have different weights."
        if number == 0:
            message += " All must begin with those of rank 0."
        if any(step["running"] for step in self.straight.steps[0]):
            message += " The optimizer steps before each all-reduce has been waited for."
        require(len({step["weights"] for step in ranks}) == 1, message)
        message = f"After {number} steps, the ranks' optimizers have different states."
        message += " Are the weights averaged, and not the gradients?"
        require(len({step["state"] for step in ranks}) == 1, message)

    def compare_start(self):
        """Raises WrongError, too, if the first update is n times the right one, or 1/n."""
        super().compare_start()
        if self.stage.processes == 1:
            return
        before, after = self.sum_of_weights(0), self.sum_of_weights(1)
        parameters = self.train(self.straight.batches()[:1])[0].parameters()
        expected = sum(parameter.double().sum().item() for parameter in parameters)
        ratio = (after - before) / (expected - before)
        for wrong, why in (
            (1 / self.stage.processes, "are the gradients averaged twice?"),
            (self.stage.processes, "are the gradients summed, or is the rate multiplied by it?"),
        ):
            message = f"The first update is {wrong:g} times the right one: {why}"
            require(abs(ratio / wrong - 1) >= 0.01, message)

    def check_snapshot(self):
        model, _, _, optimizer = self.task()
        snapshot = self.load("straight")
        try:
            model.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            epochs = snapshot["epochs_run"]
        except Exception as error:
            message = f"The stage before cannot load its snapshot: {error!r:.300}"
            raise WrongError(message) from error
        require(epochs == EPOCHS, f"After {EPOCHS} epochs it holds epochs_run {epochs}.")
        message = "The optimizer's state in it is empty: is it that of another one?"
        require(optimizer.state or not self.plain_loop[1].state, message)

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
            message = f"Two runs begin with different {what}: is there no seed?"
            require(first[what] == again[what], message)

    def check_dropout(self):
        for number, ranks in enumerate(zip(*self.straight.steps, strict=False), 1):
            states = {step["random_state"] for step in ranks}
            message = f"In step {number}, two ranks draw the same random numbers."
            require(len(states) == len(ranks), message)

    def check_resume(self):
        what = f"Started again after 1 of {EPOCHS} epochs"
        self.resumed.succeed_after((EPOCHS - 1) * self.epoch_steps, what)
        first, second = (self.straight.batches()[n * self.epoch_steps] for n in (0, 1))
        repeats = sorted(self.resumed.batches()[0]) == sorted(first) != sorted(second)
        require(not repeats, "Resumed in epoch 2, it takes the samples in epoch 1's order.")
        saved = self.load("resumed").get("epochs_run")
        message = f"Saving every 2 epochs, it ends after {EPOCHS}, and saved {saved}."
        require(saved == EPOCHS, message)
        self.compare("Resumed after epoch 1, and not interrupted", "resumed")
        what = f"Started again when all {EPOCHS} epochs are done"
        self.run(EPOCHS, "resumed").succeed_after(0, what)

    def check_previous(self):
        batches = self.straight.batches()
        model, optimizer, _ = self.train(batches[: self.epoch_steps])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": 1}
        torch.save(state, self.folder / "previous")
        run = self.run(2, "previous")
        run.succeed_after(self.epoch_steps, "From a snapshot of epoch 1 to epoch 2")
        batches = batches[: self.epoch_steps] + run.batches()
        self.compare("Resumed from it", "previous", list(self.train(batches)[0].parameters()))

    def check_gpus(self):
        run, expected = self.on_gpus
        bound = run.values("bound")
        run.require({*bound} == {*expected}, f"set_device got {bound}, where {expected} is right.")
        for name in run.values("backend"):
            require("nccl" in str(name), f"On GPUs, the backend is {name}.")
        message = "torch.load has no map_location: all ranks load onto rank 0's GPU."
        require("None" not in self.resumed.values("loaded_to"), message)

    @property
    def gpu_nodes(self):
        if self.stage.processes == 1 or self.stage.same_samples:
            return super().gpu_nodes
        # Three processes do not divide 2048 samples: some samplers then pad the epoch, or cut it.
        in_one_folder = self.stage.launchers in (PYTHON, TORCHRUN)
        return ["."] * 3 if in_one_folder else ["node1", "node1", "node2"]

    @property
    def can_resume(self):
        return self.resumed.succeeded  # else see `resume`

    def check_restart(self):
        step = 2 * self.epoch_steps + 8
        more = "--save_every_steps 5" if self.stage.saves_steps else ""
        run = self.run(EPOCHS, "killed", more, launchers=RESTARTING, rank=1, step=step, signal=9)
        run.succeed()
        resumed_at = EPOCHS * self.epoch_steps - min(map(len, run.steps))
        message = f"Killed after {step} steps, it resumed after {resumed_at}. {more}"
        require(step - resumed_at <= (5 if more else 8), message)
        self.compare("Killed in epoch 3 and restarted, and not killed", "killed")

    def keep_newer(self, snapshot, steps):
        shutil.copy(self.folder / snapshot, self.folder / "newer")
        self.newer_steps = steps

    def on_own_disks(self, total, newer):
        """Returns a run on two nodes with different snapshots, the second of them newer."""
        self.first_epoch.succeed()
        for node, snapshot in (("node1", "first"), ("node2", newer)):
            (self.folder / node).mkdir(exist_ok=True)
            shutil.copy(self.folder / snapshot, self.folder / node / "disks")
        return self.run(total, "disks", nodes=["node1", "node2"])

    def check_newest(self):
        run = self.on_own_disks(EPOCHS, "newer")
        steps = EPOCHS * self.epoch_steps - self.newer_steps
        run.succeed_after(steps, "Resumed where the other node has a newer snapshot")
        self.compare("Resumed where the other node had the newer snapshot", "node1/disks")

    def check_disks(self):
        newer = "newer" if self.stage.saves_steps else "straight"
        run = self.on_own_disks(EPOCHS + 1, newer)
        run.require(not run.steps, "The snapshot of one node is newer, and they train.")
        run.require(all(run.statuses), "They do not train, but end with status 0.")
        message = "One ends, and the other fails in a collective."
        run.require("RuntimeError" not in run.output, message)

    def check_steps(self):
        step = self.epoch_steps + 8
        every = "--save_every_steps 5 --num_workers 1"
        killed = self.run(EPOCHS, "steps", every, rank=0, step=step, signal=9)
        what = f"Killed after {step} steps with --save_every_steps 5"
        self.compare_resumed(killed, "steps", step // 5 * 5, every, what)

    def check_node(self):
        step = self.epoch_steps + 8
        every = "--save_every_steps 5"
        last = {"rank": "last_node", "step": step, "signal": 9}
        run = self.run(EPOCHS, "node", every, launchers=ELASTIC, **last)
        run.require(run.statuses[:1] == [0], "A node failed, and the other did not finish.")
        repeated = sum(map(len, run.steps)) - (step + 1) - EPOCHS * self.epoch_steps
        message = f"A node failed, and with {every}, the other has repeated {repeated} steps."
        require(repeated <= step % 5 + 1, message)
        self.compare("With a node that fails, and without", "node")
