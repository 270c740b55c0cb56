"""What tools.audit asks of steps: gradients, weights, what they cost, the logged loss."""

import re
import statistics
from collections import Counter
from itertools import pairwise, product

from tools.audit.data import epochs_of

ROUNDING = 1e-4  # of a gradient's product, relative to the largest
HALF = "autocast|bfloat16|float16|half"  # a script with one of these rounds more
TALKS = r"reduce|gather|broadcast|send|scatter|[sS]hard|[pP]arallel"  # between ranks
EVALUATING = "recipes/evaluate.md"
SAVING = "multigpu.md#logging-and-saving-on-one-rank"


def close(found, expected, scale, rounding=ROUNDING):
    return all(abs(a - b) <= rounding * scale for a, b in zip(found, expected, strict=True))


def factor_between(found, expected):
    """Returns by what `expected` must be multiplied to be as near to `found` as it can be."""
    square = sum(x * x for x in expected)
    return sum(a * b for a, b in zip(found, expected, strict=True)) / square if square else 0.0


def same(a, b):
    """Whether two steps have the same weights, but for rounding: DDP's first buckets are others."""
    near = abs(a["weights"] - b["weights"]) <= ROUNDING / 10 * max(1, abs(b["weights"]))
    pairs = [pair for pair in zip(a["used"], b["used"], strict=False) if None not in pair]
    scale = max((abs(x) for pair in pairs for x in pair), default=0)
    return a["digest"] == b["digest"] or (near and all(close([x], [y], scale) for x, y in pairs))


def known_products(step):
    """Returns the products of gradients that all ranks know: their own, and those of the step."""
    own, used = [s["own"] for s in step], [s["used"] for s in step]
    known = [i for i, values in enumerate(zip(*own, *used, strict=True)) if None not in values]
    return [[[values[i] for i in known] for values in kind] for kind in (own, used)]


def kind_of_gradient(step):
    """Says what the ranks' gradients are: the mean or the sum of their own, or neither."""
    if len({len(s["own"]) for s in step}) > 1:  # they hold parts of the model
        return "other"
    own, used = known_products(step)
    scale = max((abs(x) for values in own for x in values), default=0)
    total = [sum(values) for values in zip(*own, strict=True)]
    no_sum = sum(x * x for x in total) <= (ROUNDING * scale) ** 2
    if no_sum or all(close(o, own[0], scale) for o in own):
        return "unknown"
    factor = factor_between(used[0], total)  # other than 1 or the mean's by clipping
    if factor > 0 and all(close(u, [factor * x for x in total], scale) for u in used):
        return "sum" if abs(factor - 1) < ROUNDING else "mean"
    return "other"


def never_cleared(steps):
    """Whether a step's gradient is the last one's and the mean of the ranks' own together."""
    every = [s for ranks in steps for s in ranks]
    if len({len(s["own"]) for s in every}) > 1 or any(None in s["own"] + s["used"] for s in every):
        return False
    used = [ranks[0]["used"] for ranks in steps]
    own = [zip(*(s["own"] for s in ranks), strict=True) for ranks in steps]
    own = [[sum(values) / len(values) for values in means] for means in own]
    scale = max(abs(x) for values in own for x in values)
    added = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(used)]
    later = list(zip(used[1:], added, own[1:], strict=True))
    return not any(close(u, o, scale) for u, _, o in later) and all(
        close(a, o, scale) for _, a, o in later
    )


def follows(printed, losses):
    """Whether printed numbers are these losses, or a constant times them, to their last digit."""
    digits = [len(text.split("e")[0].partition(".")[2]) for text in printed]
    exponents = [int(text.partition("e")[2] or 0) for text in printed]
    units = [10.0 ** (e - d) for d, e in zip(digits, exponents, strict=True)]
    values = [float(text) for text in printed]
    factor = factor_between(values, losses)
    errors = [abs(v - factor * x) for v, x in zip(values, losses, strict=True)]
    return max(values) - min(values) > 20 * max(units) and all(
        error <= unit + 1e-5 * abs(value)
        for error, unit, value in zip(errors, units, values, strict=True)
    )


def columns(events):
    """Yields numbers that one line prints again and again, and after how many steps it does."""
    printed = {}
    for event in [event for event in events if "printed" in event]:
        numbers = printed.setdefault((event["place"], event["form"]), {})
        numbers.setdefault(event["at"], []).extend(event["printed"])
    for (place, _), numbers in printed.items():
        for column in zip(*numbers.values(), strict=False):
            if len(column) > 2:
                yield place, [*numbers], column


def mean_loss(steps, weighted):
    """Returns the mean of steps' losses, or of their samples'."""
    steps = [s for ranks in steps for s in ranks if s["losses"]]
    counts = [len(s["samples"]) if weighted else 1 for s in steps]
    losses = [statistics.fmean(s["losses"]) * n for s, n in zip(steps, counts, strict=True)]
    return sum(losses) / sum(counts) if sum(counts) else float("nan")


def follows_any(printed, ats, starts, steps):
    """Whether numbers printed after so many steps follow a mean of the losses of `steps`."""
    windows = [
        [(at - 1, at) for at in ats],
        [(at, at + 1) for at in ats],  # before the step
        list(pairwise([0, *ats])),
        [(max([0, *(n for n in starts if n < at)]), at) for at in ats],  # of the epoch
    ]
    for window, weighted in product(windows, (False, True)):
        means = [mean_loss(steps[max(start, 0) : end], weighted) for start, end in window]
        if all(m == m for m in means) and follows(printed, means):
            return True
    return False


class Training:
    """Questions about the steps of all ranks; a part of questions.Audit."""

    def look_at_steps(self, run):
        """Looks at gradients and weights, for each optimizer."""
        self.parallel = False  # whether the ranks train one model, each on data of its own
        by_rank = []
        for steps in run.steps:
            keys = dict.fromkeys(step["optimizer"] for step in steps)
            by_rank.append([[s for s in steps if s["optimizer"] == key] for key in keys])
        for ranks in zip(*by_rank, strict=False):
            steps = list(zip(*ranks, strict=False))
            kinds = {kind_of_gradient(step) for step in steps}
            self.parallel |= bool({"mean", "sum"} & kinds)
            self.parallel |= all(step["ddp"] or step["fsdp"] for step in steps[0])
            self.look_at_learning(steps)
            if kinds == {"sum"}:
                text = "gradients are summed over the ranks: right if the loss is divided by them"
                self.say("look", steps[0][0], text, "your_project.md#losses-that-are-no-plain-mean")
            if steps[0][0]["sharded"]:
                self.look_at_shards_of_weights(steps)
            elif self.ranks > 1:
                self.look_at_weights(steps, kinds)
            self.look_at_syncs(steps)
        self.look_at_costs(run)

    def look_at_learning(self, steps):
        first = steps[0][0]
        page = "singlegpu.md"
        if any(s["weights"] != s["weights"] for s in steps[-1]):
            self.say("wrong", first, "the weights become NaN", "recipes/verify.md")
        elif not any(s["largest"] for ranks in steps for s in ranks):
            self.say("wrong", first, "all gradients are 0 in every step: nothing is learned", page)
        elif len(steps) > 2 and never_cleared(steps[:4]):
            text = "gradients add up from step to step: zero_grad is missing"
            self.say("wrong", first, text, page)
        elif len({ranks[0]["digest"] for ranks in steps}) == 1 < len(steps):
            self.say("look", first, "the weights never change: is the learning rate 0?", page)
        else:
            self.say("ok", None, "gradients change the weights")
        for (before, *_), (after, *_) in pairwise(steps):
            if before["training"] and not after["training"]:
                text = "the model goes on training in eval mode: train() is missing"
                self.say("look", after, text, EVALUATING)

    def look_at_shards_of_weights(self, steps):
        """Looks whether ranks that hold the same part of a sharded model hold the same weights."""
        first = steps[0][0]
        shards = Counter(step["shard"] for step in steps[0])
        pairs = [len({(s["shard"], s["digest"]) for s in ranks}) for ranks in steps]
        if max(pairs) > len(shards):
            when = (
                f"after step {pairs.index(max(pairs))}" if pairs[0] == len(shards) else "at first"
            )
            text = f"{when}, ranks that hold the same part of the model have different weights"
            self.say("look", first, text, "gpt/hsdp.md")
        elif max(shards.values()) > 1:
            self.say("ok", None, "ranks that hold the same part of the model have equal weights")
        elif not first["fsdp"]:
            self.say("unseen", None, "whether the ranks' weights agree: they hold different parts")
        if len(shards) == 1 < self.ranks and first["held"] == first["whole"]:
            text = "each rank holds the whole model: by its mesh, nothing is sharded"
            self.say("look", first, text, "gpt/fsdp.md#sharding-the-model")

    def look_at_weights(self, steps, kinds):
        equal = [len({s["digest"] for s in ranks}) == 1 for ranks in steps]
        if all(equal):
            self.parallel = True
            self.say("ok", None, "all ranks have the same weights before each step")
            return
        number = equal.index(False)
        when = f"after step {number}" if number else "before the first step"
        kind, why = "look", "right only if each has a part of the model"
        if any(equal[number + 1 :]):
            why = "right only if they are averaged later"
        elif all(step["ddp"] for step in steps[0]):
            kind, why = "wrong", "is the model called without its DDP wrapper?"
        elif kinds <= {"mean", "sum", "unknown"} and kinds != {"unknown"}:
            kind, why = "wrong", "all must begin with those of rank 0"
        elif not re.search(TALKS, self.text):
            kind, why = "wrong", "nothing averages their gradients"
        place = steps[max(number - 1, 0)][0]
        self.say(kind, place, f"{when}, the ranks have different weights: {why}", "multigpu.md")

    def look_at_syncs(self, steps):
        first = steps[0][0]
        counts = [ranks[0]["syncs"] for ranks in steps]
        if self.ranks > 1 and len(counts) > 2 and min(counts[:-1]) > 1:  # an epoch may end within
            text = f"DDP averages the gradients {counts[0]} times in a step: is no_sync missing?"
            self.say("look", first, text, "recipes/gradient_accumulation.md")
        if self.ranks > 1 and all(ranks[0]["searches"] for ranks in steps):
            text = "find_unused_parameters costs time, and none is unused in these steps"
            self.say("look", first, text, "multigpu.md#wrapping-the-model-in-ddp")

    def look_at_costs(self, run):
        steps = run.steps[0][1:]
        for line, count in Counter(line for step in steps for line in step["waits"]).items():
            if self.gpus and count >= 0.9 * len(steps) > 3:
                text = "item() in each step: the CPU waits until the GPU is done"
                self.say("look", {"place": line}, text, "multigpu.md")
        for ranks in zip(*run.steps, strict=False):
            states = {step["random_state"] for step in ranks}
            if self.parallel and ranks[0]["dropout"] and len(states) < len(ranks):
                text = "two ranks have the same random numbers, so that they drop the same units"
                self.say("look", run.steps[0][0], text, "multigpu.md")
        for event in run.events:
            if event.get("drops"):
                self.say("look", event, "evaluates with dropout: eval() is missing", EVALUATING)
            if event.get("broadcasts") and self.ranks > 1:
                text = "evaluates through DDP, which broadcasts the buffers at each call:"
                text += " model.module does not, and need not be called by all ranks"
                self.say("look", event, text, EVALUATING)
            if "clips_scaled" in event:
                text = "gradients are clipped before the scaler's unscale_: far too much"
                self.say("look", event, text, "recipes/mixed_precision.md")

    def look_at_log(self, run):
        """Looks for a printed number that follows the loss, of all ranks or of one."""
        if self.ranks < 2 or not self.parallel:
            return
        ranks = list(zip(*run.steps, strict=False))
        found = set()
        trained = self.trained(run)
        prints = [{e["place"] for e in events if "printed" in e} for events in trained]
        for rank, events in enumerate(trained):
            own = [[step[rank]] for step in ranks]
            starts = [epoch["at"] for epoch in epochs_of(events)]
            for place, ats, numbers in columns(events):
                alone = sum(place in places for places in prints) == 1  # else each prints its own
                if follows_any(numbers, ats, starts, ranks):
                    found.add(("ok", None, "a loss that it prints is that of all ranks"))
                elif alone and follows_any(numbers, ats, starts, own):
                    found.add(("look", place, "the loss is that of one rank, not of all"))
        for kind, place, text in found:
            self.say(kind, place and {"place": place}, text, SAVING if place else "")
        if not found:
            self.say("unseen", None, "whether a loss that it logs is that of all ranks")

    def look_at_one_process(self, run):
        """Makes a step again in one process, with the samples of all ranks."""
        counts = [{len(s["samples"]) for s in ranks} for ranks in zip(*run.steps, strict=False)]
        number = next((n for n, sizes in enumerate(counts) if len(sizes) > 1), 0)
        ranks = [steps[number] for steps in run.steps]
        why = self.why_not_alone(run, ranks)
        if not why:
            whole = self.whole_run(keep=str(number))
            replay = {"AUDIT_REPLAY": str(whole.folder), "AUDIT_STEPS": "1"}
            alone = self.run("alone", ranks=1, AUDIT_SEED="7", **replay)
            ranks = [steps[number] for steps in whole.steps if number < len(steps)]
            if [len(ranks), len(alone.steps)] == [self.ranks, 1]:
                return self.compare_with_one(ranks, alone.steps[0][0], number)
            why = "it does not train so"
        self.say("unseen", None, f"whether a gradient is that of one process: {why}")
        return None

    def why_not_alone(self, run, ranks):
        """Says why a step cannot be compared with that of one process, if so."""
        samples = [sample for step in ranks for sample in step["samples"]]
        if self.unordered:
            return "its parameters have another order there"
        if not any("iterator" in event for event in run.events):
            return "it has no DataLoader"
        if any(step["sharded"] for step in ranks) or len({len(s["own"]) for s in ranks}) > 1:
            return "it is sharded"
        if any(step["batch_norm"] for step in ranks):
            return "BatchNorm depends on the batch"
        if any(step["random"] for step in ranks):
            return "it depends on random numbers"
        return "" if len({*samples}) == len(samples) else "ranks share samples"

    def compare_with_one(self, ranks, alone, number):
        samples = [sample for step in ranks for sample in step["samples"]]
        (_, (used, *_)), (_, (one,)) = known_products(ranks), known_products([alone])
        text = f"the gradient of step {number + 1} is not that of one process with all the samples"
        page = "your_project.md#losses-that-are-no-plain-mean"
        rounding = 0.03 if re.search(HALF, self.text) else 1e-3
        if sorted(samples) != sorted(alone["samples"]) or len(used) != len(one):
            text = "whether a gradient is that of one process: it has other samples"
            return self.say("unseen", None, text)
        factor = factor_between(used, one)
        scale = max(map(abs, used), default=0)
        if not scale or not any(one):
            return None  # nothing is learned
        if not close(used, [factor * x for x in one], scale, rounding):
            self.say("look", ranks[0], text, page)
        elif abs(factor - 1) > rounding:
            self.say("look", ranks[0], f"{text}, but {factor:.3g} times it", page)
        else:
            self.say("ok", None, "the gradient is that of one process with the samples of all")
        return None
