"""Asks what a step does: gradients, weights, and what it costs."""

from collections import Counter
from itertools import pairwise

from rankcheck.questions.facts import error, ok, unseen, warning
from rankcheck.questions.gradients import is_plain_mean, never_cleared


def gradients(facts):
    """Whether the gradients change the weights, and are those of all ranks."""
    for steps, kinds in zip(facts.by_optimizer, facts.kinds, strict=True):
        yield learning(steps)
        if "other" not in kinds:
            yield from undivided(steps)
        first = steps[0][0]
        if kinds == {"sum"}:
            text = "gradients are summed over the ranks: right if the loss is divided by them"
            yield warning("RC306", first, text)
        for (before, *_), (after, *_) in pairwise(steps):
            if before["training"] and not after["training"]:
                text = "training continues in eval mode: train() is missing"
                place = {"place": after["eval_place"] or after["place"]}
                yield warning("RC307", place, text)
    for event in facts.events("thrown")[:1]:
        text = f"the gradients of {event['thrown']} samples are cleared before a step has used them"
        yield warning("RC308", event, text)
    foreign = facts.first["foreign"] and not facts.first["largest"]
    for event in facts.events("stale")[:1] if not foreign else []:
        text = f"{event['stale']} gradients that this rank's optimizer does not use are never"
        text += " cleared, and add up from step to step: model.zero_grad() clears all"
        yield warning("RC309", event, text)


def undivided(steps):
    """Looks for micro-batches of a step whose mean losses are added: nothing divides their sum."""
    for ranks in steps:
        means, samples = ([step[key] for step in ranks] for key in ("means", "samples"))
        several = all(len(places) > 1 == len({*places}) and places[0] for places in means)
        own_batches = all(len({*batch}) == len(batch) for batch in samples)
        if several and own_batches and is_plain_mean(ranks):
            text = f"the mean losses of {len(means[0])} micro-batches are added, not averaged"
            yield warning("RC316", {"place": means[0][0]}, text)
            return


def learning(steps):
    first = steps[0][0]
    if any(s["weights"] != s["weights"] for s in steps[-1]):
        return error("RC301", first, "the weights become NaN")
    if not any(s["largest"] for ranks in steps for s in ranks) and first["foreign"]:
        text = "no backward pass reaches the weights that the optimizer has: were they replaced"
        return error("RC305", first, f"{text} after it was made, as fully_shard does?")
    if not any(s["largest"] for ranks in steps for s in ranks):
        return error("RC302", first, "all gradients are 0 in every step: nothing is learned")
    if len(steps) > 2 and never_cleared(steps[:4]):
        return error("RC303", first, "gradients add up from step to step: zero_grad is missing")
    if len({ranks[0]["digest"] for ranks in steps}) == 1 and len(steps) > 2:
        return warning("RC304", first, "the weights never change: is the learning rate 0?")
    return ok("gradients change the weights")


def weights(facts):
    """Whether all ranks have the same weights."""
    for steps, kinds in zip(facts.by_optimizer, facts.kinds, strict=True):
        if steps[0][0]["sharded"]:
            yield from weights_of_shards(facts, steps)
        elif facts.multi:
            yield whole_weights(facts, steps, kinds)


def weights_of_shards(facts, steps):
    """Looks whether ranks that hold the same part of a sharded model hold the same weights."""
    first = steps[0][0]
    shards = Counter(step["shard"] for step in steps[0])
    pairs = [len({(s["shard"], s["digest"]) for s in ranks}) for ranks in steps]
    if max(pairs) > len(shards):
        number = next(n for n, count in enumerate(pairs) if count > len(shards))
        when = f"after step {number}" if number else "at first"
        text = f"{when}, ranks that hold the same part of the model have different weights"
        draws = len({s["random_state"] for s in steps[0]}) > 1
        text += ": does each add random numbers of its own?" if number and draws else ""
        stays = len(shards) not in pairs[number:]
        say = error if number and stays else warning
        yield say("RC311", first, text)
    elif max(shards.values()) > 1:
        yield ok("ranks that hold the same part of the model have equal weights")
    elif not first["fsdp"]:
        yield unseen("whether the ranks' weights agree: they hold different parts")
    if len(shards) == 1 < facts.ranks and first["held"] == first["whole"]:
        text = "each rank holds the whole model: by its mesh, nothing is sharded"
        yield warning("RC312", first, text)


def whole_weights(facts, steps, kinds):
    equal = [
        len({s["digest"] for s in r}) == 1 or len({s["called"] for s in r}) == 1 for r in steps
    ]
    if all(equal):
        return ok("all ranks have the same weights before each step")
    number = equal.index(False)
    when = f"after step {number}" if number else "before the first step"
    before = steps[max(number - 1, 0)]
    one_model = len({s["shapes"] for s in before}) == 1
    own_data = len({str(s["samples"]) for s in before}) > 1
    talks = any(s["talks"] for ranks in steps for s in ranks)
    say, why = warning, "right only if each has a part of the model"
    if any(equal[number + 1 :]):
        again = equal.index(True, number)
        return ok(f"{when}, the ranks' weights differ; after step {again}, they are equal again")
    if all(step["ddp"] and step["syncs"] and not step["last_syncs"] for step in before):
        say, why = error, "no_sync leaves out the last micro-batch, whose pass must average"
    elif all(step["ddp"] for step in before) and any(step["syncs"] for step in before):
        say, why = error, "does each rank add random numbers of its own?"
    elif all(step["ddp"] for step in before):
        say, why = error, "is the model called without its DDP wrapper?"
    elif kinds <= {"mean", "sum", "unknown"} and kinds != {"unknown"}:
        say, why = error, "all must begin with those of rank 0"
    elif one_model and not talks and facts.run.limited:
        why = "in these steps, nothing averages their gradients"
    elif one_model and not talks:
        # An ensemble would give each of its models all samples, or draw them.
        shared = bool(facts.epochs) and facts.epochs[0][0]["shares"] == facts.ranks
        say = error if shared else warning
        why = "nothing averages their gradients"
    elif one_model and number and own_data and not facts.run.limited:
        why = "not all of their gradients are averaged"
    return say("RC310", before[0], f"{when}, the ranks have different weights: {why}")


def costs(facts):
    """Whether a step pays for nothing."""
    for steps in facts.by_optimizer if facts.multi else []:
        first = steps[0][0]
        counts = [ranks[0]["syncs"] for ranks in steps]
        if len(counts) > 2 and min(counts[:-1]) > 1:  # an epoch may end within
            text = f"DDP averages the gradients {counts[0]} times in a step: is no_sync missing?"
            yield warning("RC801", first, text)
        if first["lone_root"]:
            text = "fully_shard got the root, and none of its blocks: each pass gathers the model"
            yield warning("RC806", first, text)
        if all(ranks[0]["searches"] for ranks in steps):
            text = "find_unused_parameters costs time, and none is unused in these steps"
            yield warning("RC802", first, text)
    yield from waits(facts)
    yield from barriers(facts)
    last = facts.run.steps[0][-1]
    if last["float16"] and all(step["scale"] is None for step in facts.run.steps[0]):
        text = "float16 without a GradScaler: small gradients become 0"
        yield warning("RC317", {"place": last["float16"]}, text)
    for ranks in facts.steps:
        states = {step["random_state"] for step in ranks}
        masks = {step["drops_with"] for step in ranks}
        if facts.replicas and ranks[0]["dropout"] and min(len(states), len(masks)) < len(ranks):
            text = "two ranks have the same random numbers, so they drop the same units"
            yield warning("RC315", facts.first, text)
        elif facts.replicas and ranks[0]["random"] and len(states) < len(ranks):
            text = "two ranks have the same random numbers, and draw some in a step: the same noise"
            yield warning("RC315", facts.first, text)
    for event in facts.run.events:
        if event.get("drops"):
            yield warning("RC703", event, "evaluates with dropout: eval() is missing")
        elif event.get("normalizes"):
            text = "evaluates with BatchNorm in training mode: eval() is missing"
            yield warning("RC704", event, text)
        if event.get("broadcasts") and facts.multi:
            text = "evaluates through DDP, which broadcasts the buffers at each call:"
            text += " model.module does not, and need not be called by all ranks"
            yield warning("RC804", event, text)
        if "clips_scaled" in event:
            text = "gradients are clipped before the scaler's unscale_: far too much"
            yield warning("RC314", event, text)


def waits(facts):
    """Yields the lines in which each step of an optimizer waits for the GPU."""
    first, *steps = facts.run.steps[0]
    if not facts.on_gpus or len(steps) < 4:
        return
    optimizers = len({first["optimizer"], *(step["optimizer"] for step in steps)})
    for line, count in Counter(line for step in steps for line in step["waits"]).items():
        if count * optimizers >= 0.9 * len(steps):
            text = "reads a tensor's value in each step, or synchronizes: the CPU waits for the GPU"
            yield warning("RC803", {"place": line}, text)


def barriers(facts):
    """Yields the lines that call a barrier in each step."""
    total = len(facts.run.steps[0])
    calls = [e for e in facts.run.ranks[0] if e.get("call") == "barrier" and 0 < e["at"] < total]
    for line in dict.fromkeys(event["place"] for event in calls):
        times = len({event["at"] for event in calls if event["place"] == line})
        if total > 4 and times >= 0.9 * (total - 1):
            text = "a barrier in each step: all ranks wait for the slowest, twice"
            yield warning("RC805", {"place": line}, text)
