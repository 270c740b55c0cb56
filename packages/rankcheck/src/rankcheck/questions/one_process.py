"""Asks whether a gradient of all ranks is that of one process with all samples."""

import math
from itertools import takewhile

from rankcheck.questions.facts import ok, unseen, warning
from rankcheck.questions.gradients import close, factor_between, known_products, same
from rankcheck.replay import CANNOT_JOIN

WHAT = "whether a gradient is that of one process"


def gradient(facts):
    """Whether a gradient is that of one process."""
    if not facts.replicas:
        return
    number = step_to_compare(facts.steps)
    finding = gradient_of_step(facts, number)
    even = len({len(step["samples"]) for step in facts.steps[number]}) == 1
    if finding.rule and number and even and gradient_of_step(facts, 0).level == "ok":
        text = f"in the first step, it is; in step {number + 1}, the script may keep something else"
        finding = unseen(f"{WHAT}: {text}")
    yield finding


def gradient_of_step(facts, number):
    """Compares a step of a run with that of one process, which gets the batches of all ranks."""
    why = why_not(facts, facts.steps[number])
    if not why:
        calm = {"AUDIT_CALM": "1"} if depends_on_batch(facts.steps[number]) else {}
        if calm or facts.whole:
            keep = {"AUDIT_KEEP": str(number), "AUDIT_STEPS": str(number + 1)}
            whole = facts.rerun("calm" if calm else "short", AUDIT_SEED="7", **keep, **calm)
        else:
            whole = facts.whole_run(keep=str(number))
        replay = {"AUDIT_REPLAY": str(whole.folder), "AUDIT_STEPS": "1"} | calm
        gpus = 1 if facts.launcher == "python" else facts.ranks  # a rank for each, if it spawns
        alone = facts.rerun("alone", ranks=1, gpus=gpus, AUDIT_SEED="7", **replay)
        ranks = [steps[number] for steps in whole.steps if number < len(steps)]
        if [len(ranks), len(alone.steps)] == [facts.ranks, 1]:
            finding = compare(ranks, alone.steps[0][0], number, calm)
            if finding.rule:
                again = facts.rerun("alone", ranks=1, gpus=gpus, AUDIT_SEED="7", **replay)
                if not (again.steps and same(again.steps[0][0], alone.steps[0][0])):
                    finding = unseen(f"{WHAT}: repeated in one process, the step has another one")
            return finding
        said = (alone.lines() or [""])[-1]
        why = CANNOT_JOIN if CANNOT_JOIN in said else f"alone, it does not train: {said}"
        if len(ranks) < facts.ranks:
            why = "with a seed, it made fewer steps"
        elif len(alone.steps) > 1:
            why = f"it starts {len(alone.steps)} processes there as well"
    return unseen(f"{WHAT}: {why}")


def step_to_compare(steps):
    """Returns the number of a late step, since a wrong mean may be near the right one at first.

    The ranks' shares are uneven in it, if they are in one; its gradient is more than rounding. One
    process has the first step's weights alone of what no optimizer trains, such as a teacher.
    """
    first = steps[0][0]
    if any(ranks[0]["others"] for ranks in steps):
        return 0
    steps = list(takewhile(lambda ranks: ranks[0]["shapes"] == first["shapes"], steps))
    largest = [max(step["largest"] for step in ranks) for ranks in steps]
    finite = [size for size in largest if math.isfinite(size)]
    clear = [n for n, size in enumerate(largest) if finite and size >= 0.01 * max(finite)]
    uneven = [n for n in clear if len({len(step["samples"]) for step in steps[n]}) > 1]
    return (uneven or clear or [0])[-1]


def why_not(facts, ranks):
    """Says why a step cannot be compared with that of one process, if so."""
    if facts.args.no_replay:
        return "--no-replay"
    if facts.outside:
        return f"it saves to {facts.outside[0]}; let it save to a relative path"
    if any(kind != "targets" for kind, *_ in facts.run.differences()):
        return "its parameters or buffers are in a different order there"
    if not all(math.isfinite(step["largest"]) for step in ranks):
        return "it is not finite"
    if not facts.events("iterator"):
        return "it has no DataLoader"
    if any(step["sharded"] for step in ranks) or len({len(s["own"]) for s in ranks}) > 1:
        return "it is sharded"
    if any(step["random"] and not step["dropout"] for step in ranks):
        return "it depends on random numbers"
    if len({str(step["used"]) for step in ranks}) > 1:
        return "each rank uses a gradient of its own"
    return ""


def depends_on_batch(ranks):
    """Whether dropout or BatchNorm make a gradient that no other batches, or ranks, would have."""
    return any(step["dropout"] or step["batch_norm"] for step in ranks)


def compare(ranks, alone, number, calm):
    how = " (dropout and BatchNorm in eval mode)" if calm else ""
    samples = [sample for step in ranks for sample in step["samples"]]
    pairs = zip(ranks[0]["used"], alone["used"], strict=False)
    known = [pair for pair in pairs if None not in pair]
    used, one = [used for used, _ in known], [one for _, one in known]
    text = f"the gradient of step {number + 1} is not that of one process with all the samples"
    rounding = 0.03 if any(step["half"] for step in ranks) else 1e-3
    scale = max(map(abs, used), default=0)
    if sorted(samples) != sorted(alone["samples"]):
        return unseen(f"{WHAT}: it has different samples")
    if not scale or not any(one):
        return unseen(f"{WHAT}: it is 0")
    if calm and any(step["random"] for step in [*ranks, alone]):
        return unseen(f"{WHAT}: it depends on random numbers")
    factor = factor_between(used, one)
    if not close(used, [factor * x for x in one], scale, rounding):
        return warning("RC313", ranks[0], text)
    if abs(factor - 1) > rounding:
        return warning("RC313", ranks[0], f"{text}, but {factor:.3g} times it")
    own, _ = known_products(ranks)
    if own[0] and all(close(other, own[0], scale, rounding) for other in own):
        return unseen(f"{WHAT}: each rank has the same one alone")
    return ok(f"the gradient is that of one process with the samples of all{how}")
