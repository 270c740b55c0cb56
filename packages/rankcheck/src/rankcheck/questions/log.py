"""Asks whether a logged loss is that of all ranks.

A printed number is compared with the losses of backward passes: the last one, the mean of those
since the last step, the last number, or the beginning of the epoch, or a moving average.
"""

import re
import statistics
from itertools import product

from rankcheck.questions.facts import ok, unseen, warning
from rankcheck.questions.gradients import factor_between

DECAYS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)  # of moving averages
LOSSES = ("loss", "losses", "mse", "nll", "perplexity", "ppl")  # words before a printed number
SCORES = ("acc", "accuracy", "prec", "precision", "top")
NOTHING = "before it is printed, the ranks exchange nothing"
MIN_AVERAGES = 5  # numbers that follow one


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


def columns(events, at_least=3):
    """Yields numbers that one line prints again and again, and after how many backward passes.

    These have one label, the word before them. The place of a line that several others call, such
    as that of a log function, is theirs.
    """
    prints = [event for event in events if "printed" in event]
    callers = {}
    for event in prints:
        callers.setdefault(event["place"], set()).add(event["called_in"])
    printed = {}
    for event in prints:
        shared = len(callers[event["place"]]) > 1 and event["called_in"]
        place = event["called_in"] if shared else event["place"]
        for number, label in zip(event["printed"], event["labels"], strict=True):
            key = (place, event["place"], label)
            printed.setdefault(key, {}).setdefault(event["passes"], []).append(number)
    for (place, line, label), numbers in printed.items():
        several = any(len(found) > 1 for found in numbers.values())
        for order in (1, -1)[: 1 + several]:  # a progress bar first repeats its last numbers
            for column in zip(*(found[::order] for found in numbers.values()), strict=False):
                if len(column) >= at_least:
                    yield place, line, label, [*numbers], column


def mean_loss(ranks, start, end, weighted):
    """Returns the mean of the losses of these passes of all `ranks`, or of their samples'."""
    passes = [loss for losses in ranks for loss in losses[start:end] if loss[0] is not None]
    counts = [count if weighted else 1 for _, count in passes]
    total = sum(loss * count for (loss, _), count in zip(passes, counts, strict=True))
    return total / sum(counts) if sum(counts) else float("nan")


def since(begins, end):
    return max([0, *(begin for begin in begins if begin < end)])


def spans(ends, steps, epochs):
    """Yields a name, and the passes that each number may be the mean of: from one to another."""
    yield "last", [(end - 1, end) for end in ends]
    yield "next", [(end, end + 1) for end in ends]  # it is printed before the backward pass
    yield "other", [(end - 2, end - 1) for end in ends]  # two losses take turns
    for begins in (steps, ends, epochs):
        yield "mean", [(since(begins, end), end) for end in ends]


def moving_averages(ends, steps, losses):
    """Yields what moving averages of the steps' losses may have been, where a number is printed."""
    done = [sum(step <= end for step in steps) for end in ends]
    if not losses or not all(done):
        return
    for decay in DECAYS:
        mean, means, from_first = 0.0, [], [losses[0]]
        for loss in losses:
            mean = decay * mean + (1 - decay) * loss
            means.append(mean)
            from_first.append(decay * from_first[-1] + (1 - decay) * loss)
        yield [means[n - 1] for n in done]
        yield [means[n - 1] / (1 - decay**n) for n in done]
        yield [from_first[n] for n in done]


def span_of(printed, ends, steps, epochs, ranks):
    """Returns the name of a span whose mean loss the numbers follow, or None."""
    for (name, passes), weighted in product(spans(ends, steps, epochs), (False, True)):
        means = [mean_loss(ranks, max(start, 0), end, weighted) for start, end in passes]
        if all(mean == mean for mean in means) and follows(printed, means):
            return name
    for name in ("last", "mean"):
        starts = [step - 1 if name == "last" else since(steps, step) for step in steps]
        of_steps = [mean_loss(ranks, *span, False) for span in zip(starts, steps, strict=True)]
        known = all(loss == loss for loss in of_steps)
        for averages in moving_averages(ends, steps, of_steps) if known else ():
            if len(printed) >= MIN_AVERAGES and follows(printed, averages):
                return name
    return None


def losses(facts):
    """Whether a loss that it logs is that of all ranks."""
    if not facts.replicas:
        return
    ranks = [[loss for e in events for loss in e.get("losses", [])] for events in facts.run.ranks]
    counts = [[len(step["losses"]) for step, *_ in steps] for steps in facts.by_optimizer]
    counts = [passes for passes in counts if any(passes)]  # others step after the same ones
    accumulates = len(counts) == 1 and statistics.median(counts[0]) > 1
    prints = [{e["place"] for e in events if "printed" in e} for events in facts.run.ranks]
    found = set()
    for rank, events in enumerate(facts.run.ranks):
        steps = [event["passes"] for event in events if "samples" in event]
        epochs = [iterator["passes"] for iterator in facts.loaders[rank]]
        for place, line, _, ends, numbers in columns(events):
            alone = sum(line in places for places in prints) == 1
            if span_of(numbers, ends, steps, epochs, ranks):
                found.add(ok("a loss that it prints is that of all ranks"))
            elif span := span_of(numbers, ends, steps, epochs, [ranks[rank]]):
                last = accumulates and span in ("last", "other")
                text = "the loss is that of one rank, not of all"
                text = text if alone else "each rank prints the loss of its own samples"
                text += ", and of its last micro-batch" if last else ""
                found.add(warning("RC701", {"place": place}, text))
    text = f"the loss is that of one rank, not of all: {NOTHING}"
    places = () if found else unshared(facts, LOSSES)
    found |= {warning("RC701", {"place": place}, text) for place in places}
    yield from found or [unseen("whether a loss that it logs is that of all ranks")]


def unshared(facts, labels):
    """Yields the lines that print numbers of a training whose ranks exchange only gradients."""
    for events in facts.run.ranks:
        alone = []
        for event in events:
            if event["passes"] and event.get("call", "barrier") != "barrier":
                break
            alone.append(event)
        trained = [e for e in alone if "printed" in e and e["passes"] and not e["evaluated"]]
        for place, _, label, _, numbers in columns(trained, at_least=1):
            is_named = {*re.findall(r"[a-z]+", label.lower())} & {*labels}
            if is_named and (len({*numbers}) > 1 or len(numbers) == 1):
                yield place


def runs(facts):
    """Whether one rank tells a tracker what all do."""
    started = [[e for e in events if "tracks" in e] for events in facts.run.ranks]
    first = [events[0]["tracks"] for events in started if events]
    if len(first) > 1 == len({*first}):
        event = next(events[0] for events in started if events)
        text = f"each rank starts a run of {first[0]}: rank 0 is enough"
        yield warning("RC708", event, text)


def scores(facts):
    """Whether a score that it prints while it trains is that of all ranks."""
    for place in unshared(facts, SCORES) if facts.replicas else ():
        text = f"the score is that of one rank's samples: {NOTHING}"
        yield warning("RC707", {"place": place}, text)
