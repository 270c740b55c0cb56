"""Asks of data: whose samples are whose, their order, their random numbers."""

from collections import Counter, defaultdict
from itertools import pairwise

from rankcheck.questions.facts import error, ok, unseen, warning


def samples(facts):
    """Whether each sample comes to one rank, and is the same on all."""
    if not facts.multi:
        return
    first = facts.epochs[0] if facts.epochs else []
    if any(share["shares"] not in (None, facts.ranks) for share in first):
        yield unseen("which rank takes which samples: some ranks share a model")
        return
    if not facts.replicas:
        yield unseen("which rank takes which samples: the ranks may have parts of a model")
        return
    by_step = [[step["samples"] for step in ranks] for ranks in facts.steps]
    distinct = {sample for ranks in by_step for sample in ranks[0]}
    if all(ranks[0] == other for ranks in by_step for other in ranks) and len(distinct) > 1:
        place = first[0] if first else facts.first
        yield error("RC203", place, f"all {facts.ranks} ranks train on the same samples")
        return
    if takes_parts(facts):
        yield unseen("whether each sample comes to one rank: each takes its part of a batch itself")
        return
    findings = []
    for shares in facts.epochs:
        if "ended" in shares[0]:
            findings += shares_of_epoch(shares, facts.draws)
    yield from findings
    if not any(finding.rule == "RC204" for finding in findings):
        yield from copies(first, facts.loaders)


def takes_parts(facts):
    """Whether each rank's model gets only a part of what its loaders yield."""
    for steps, loaders in zip(facts.run.steps, facts.loaders, strict=True):
        if len(steps) < 3:  # what is loaded ahead is much of it
            return False
        loaded = sum(len(iterator["hashed"]) for iterator in loaders if "trains" in iterator)
        if not 0 < sum(len(step["samples"]) for step in steps) <= 0.75 * loaded:
            return False
    return True


def shares_of_epoch(shares, draws):
    """Looks whether the ranks' shares of an epoch overlap, and whether samples are missing."""
    first = shares[0]
    hashed = [set(share["hashed"]) for share in shares]
    indices = [set(share["indices"]) - {None} for share in shares]
    if not all(hashed):  # such as batches of a class that pytree does not open
        yield unseen("whether each sample comes to one rank: its batches cannot be opened")
        return
    if any(len(h) < len(share["hashed"]) for h, share in zip(hashed, shares, strict=True)):
        yield unseen("whether each sample comes to one rank: some have the same content")
        return
    several = sum(map(len, hashed)) - len(set.union(*hashed))
    repeated = sum(map(len, indices)) - len(set.union(*indices))  # by a sampler, in the last batch
    disjoint = all(indices) and repeated < len(shares)
    missing = first["size"] - len(set.union(*indices))
    if several >= len(shares) and disjoint and same_data(shares):
        yield unseen("whether each sample comes to one rank: some are several times in the data")
    elif all(h == hashed[0] for h in hashed):
        yield error("RC203", first, f"each rank trains on all {len(hashed[0])} samples of an epoch")
    elif several >= len(shares) and disjoint:
        text = f"the ranks' indices differ, but {several} of their samples are the same:"
        say = error if len({share["inputs"] for share in shares} - {""}) > 1 else warning
        yield say("RC204", first, f"{text} each makes, splits or shuffles its data")
    elif several >= len(shares):
        yield warning("RC205", first, f"in an epoch, {several} samples are on more than one rank")
    elif missing > 0 and first["shuffle"] is not None and not first["own_order"]:
        yield warning("RC206", first, f"{missing} samples are missing from an epoch: drop_last?")
    elif len(indices[0]) > 1 and indices.count(indices[0]) == len(shares) and same_data(shares):
        text = f"each rank trains on all {len(indices[0])} samples, which are made anew each time"
        yield warning("RC207", first, text)
    elif draws and not disjoint:
        yield unseen("whether each sample comes to one rank: random numbers make them")
    else:
        yield ok("in an epoch, each sample comes to one rank")


def same_data(shares):
    inputs = {share["inputs"] for share in shares}
    return len(inputs) == 1 and "" not in inputs


def copies(shares, loaders):
    """Looks whether a data set is the same on all ranks, where they draw from the same one."""
    found = {share["inputs"] for share in shares}
    if not shares or any(share["shuffle"] is None for share in shares):
        return  # without a DistributedSampler, a rank may have data of its own
    if "" in found:
        yield copies_by_index(shares[0], loaders)
    elif len(found) > 1:
        text = "samples are not the same on all ranks: each makes, splits or shuffles its data"
        yield error("RC204", shares[0], text)
    elif len({share["targets"] for share in shares}) == 1:
        yield ok("samples are the same on all ranks")


def copies_by_index(first, loaders):
    """Compares samples by their indices, which come to other ranks in other epochs."""
    by_rank = []
    for iterators in loaders:
        contents = defaultdict(list)
        for share in [it for it in iterators if "trains" in it and it["size"] == first["size"]]:
            pairs = zip(share["indices"], share["hashed"], strict=False)
            for index, content in pairs if len(share["indices"]) == len(share["hashed"]) else ():
                contents[index].append(content)
        by_rank.append(contents)
    again = [found for contents in by_rank for found in contents.values() if len(found) > 1]
    both = [(a[i][0], b[i][0]) for a, b in pairwise(by_rank) for i in a.keys() & b.keys()]
    differ = sum(one != other for one, other in both)
    if not again or any(len({*found}) > 1 for found in again) or 0 < differ < len(both) or not both:
        return unseen("whether a sample is the same on all ranks")
    if differ:
        text = "samples are not the same on all ranks: each makes, splits or shuffles its data"
        return error("RC204", first, text)
    return ok("samples are the same on all ranks")


def order(facts):
    """Whether the order of the samples differs from epoch to epoch."""
    by_loader = defaultdict(list)
    for shares in facts.epochs:
        by_loader[shares[0]["place"], shares[0]["size"]].append(shares[0])
    epochs = max(by_loader.values(), key=len, default=[])
    if len(epochs) < 2:
        yield unseen("whether the order of the samples differs: it has one epoch, or no DataLoader")
        return
    first, second = epochs[:2]
    repeats = is_repeated(first, second)
    if repeats is None:
        yield unseen("whether the order of the samples differs: they have no indices")
    elif not repeats:
        yield ok("the order of the samples differs from epoch to epoch")
    elif first["shuffle"] and not first["own_order"]:
        is_seen = first["inputs"] or first["hashed"] == second["hashed"]
        say = error if is_seen else warning  # a data set may give its samples other places
        yield say("RC201", first, "each epoch has the same order: set_epoch is not called")
    else:
        numbers = [int(index) for index in first["indices"] if str(index).isdigit()]
        is_shuffled = numbers != sorted(numbers)
        why = "the sampler shuffles once" if is_shuffled else "the samples are not shuffled"
        yield warning("RC202", first, f"each epoch has the same order: {why}")


def is_repeated(epoch, other):
    """Whether an epoch has the samples of another one in their order; None if that is not seen.

    A data set may itself give its samples other places in each epoch; random numbers, such as
    those of an augmentation, may make each sample another one.
    """
    length = min(len(epoch["indices"]), len(other["indices"]))
    if length < 4:
        return None
    if epoch["hashed"][:length] == other["hashed"][:length] != []:
        return True
    if None in epoch["indices"]:
        return None
    same_indices = epoch["indices"][:length] == other["indices"][:length]
    return same_indices and epoch["inputs"] == other["inputs"]


def random_numbers(facts):
    """Whether two ranks, or two data workers, make samples with equal random numbers."""
    if not (facts.epochs and facts.replicas):
        return
    files = [path.read_text().splitlines() for path in facts.run.folder.glob("*.drawn")]
    counts = Counter(state for lines in files for state in set(lines))
    again = sorted({state.split()[0] for state in counts if counts[state] > 1})
    if again:
        text = f"ranks make their samples with the same random numbers, of {', '.join(again)}"
        yield warning("RC208", facts.epochs[0][0], text)


def evaluation(facts):
    """Whether each rank evaluates all samples, or prints the score of its own."""
    for shares in zip(*facts.loaders, strict=False) if facts.multi else []:
        hashed = [set(share["hashed"]) for share in shares]
        if not all(share["evaluates"] and "trains" not in share for share in shares):
            continue
        indices = [index for share in shares for index in share["indices"] if index is not None]
        twice = len(indices) - len(set(indices))
        if len(hashed[0]) > 1 and hashed.count(hashed[0]) > 1:
            text = f"each rank evaluates all {len(hashed[0])} samples: split them, and add up"
            yield warning("RC702", shares[0], text)
            return
        if dropped := shares[0]["dropped"]:
            text = f"drop_last: on each rank, {dropped} samples are never evaluated"
            yield warning("RC706", shares[0], text)
        if 0 < twice < len(shares) == shares[0]["shares"]:
            text = f"{twice} of {len(set(indices))} samples are evaluated twice: the sampler"
            yield warning("RC706", shares[0], f"{text} repeats some, to make equal shares")
        if len(set.union(*hashed)) > max(map(len, hashed)):
            yield from own_scores(facts, {share["iterator"] for share in shares})


def own_scores(facts, iterators):
    """Looks for numbers that a rank prints after its evaluation, while the ranks exchange none."""
    for events in facts.run.ranks:
        evaluated, printed = False, None
        for event in events:
            ends = "samples" in event or "finished" in event  # by the next step
            if event.get("call", "barrier") != "barrier" or (ends and not printed):
                evaluated, printed = False, None
            elif event.get("evaluates") and event["iterator"] in iterators:
                evaluated = True
            elif evaluated and "printed" in event:
                printed = event
            elif ends:
                text = "what is printed after an evaluation is the score of one rank's samples"
                yield warning("RC705", printed, f"{text}: nothing adds the ranks' up")
                return
