"""What tools.audit asks of data: whose samples are whose, their order, their random numbers."""

from collections import Counter

SAMPLER = "multigpu.md#what-happens-without-the-sampler"


def rank_of(events):
    return max(event["rank"] for event in events)


def epochs_of(events):
    """Returns the iterators of DataLoaders that a process has trained with, in their order."""
    found, kept = {}, []
    for event in [event for event in events if "iterator" in event]:
        if "size" in event:
            found[event["iterator"]] = event | {"indices": [], "hashed": []}
            kept.append(found[event["iterator"]])
        elif "indices" in event:
            kept_lists = found[event["iterator"]]
            kept_lists["indices"] += event["indices"]
            kept_lists["hashed"] += event["hashed"]
        elif event["iterator"] in found:
            found[event["iterator"]] |= event | {"place": found[event["iterator"]]["place"]}
    return [epoch for epoch in kept if "trains" in epoch]


class Data:
    """Questions about the samples of all ranks; a part of questions.Audit."""

    @staticmethod
    def trained(run):
        """Returns the events of each process that has trained, by rank."""
        trained = [events for events in run.processes if any("samples" in e for e in events)]
        return sorted(trained, key=rank_of)

    def look_at_data(self, run):
        by_rank = [epochs_of(events) for events in self.trained(run)]
        epochs = list(zip(*by_rank, strict=False))
        if any(share["shares"] not in (None, self.ranks) for share in by_rank[0]):
            self.say("unseen", None, "whose samples are whose: some ranks share a model")
        elif self.parallel and self.ranks > 1:
            samples = [[s["samples"] for s in ranks] for ranks in zip(*run.steps, strict=False)]
            distinct = {sample for ranks in samples for sample in ranks[0]}
            if all(ranks[0] == other for ranks in samples for other in ranks) and len(distinct) > 1:
                place = epochs[0][0] if epochs else run.steps[0][0]
                text = f"all {self.ranks} ranks train on the same samples"
                self.say("wrong", place, text, SAMPLER)
            else:
                self.look_at_shards([shares for shares in epochs if "ended" in shares[0]])
                self.look_at_copies(epochs[0] if epochs else [])
        if len(by_rank[0]) > 1:
            self.look_at_order(*by_rank[0][:2])
        if epochs and self.parallel:
            self.look_at_random_numbers(run, epochs[0][0])

    def look_at_shards(self, epochs):
        """Looks whether the ranks' shares of an epoch overlap, and whether samples are missing."""
        for shares in epochs:
            first = shares[0]
            hashed = [set(share["hashed"]) for share in shares]
            if not all(hashed):  # such as batches of a class that pytree does not open
                self.say("unseen", None, "whether each sample comes to one rank")
                continue
            several = sum(map(len, hashed)) - len(set.union(*hashed))
            missing = first["size"] - len({i for share in shares for i in share["indices"]})
            if any(len(h) < len(share["hashed"]) for h, share in zip(hashed, shares, strict=True)):
                continue  # some samples have the same content
            if hashed[0] and all(h == hashed[0] for h in hashed):
                text = f"each rank trains on all {len(hashed[0])} samples of an epoch"
                self.say("wrong", first, text, SAMPLER)
            elif several >= len(shares):
                self.say(
                    "look", first, f"in an epoch, {several} samples come to several ranks", SAMPLER
                )
            elif missing > 0 and first["shuffle"] is not None:
                self.say("look", first, f"{missing} samples do not come in an epoch: drop_last?")
            else:
                self.say("ok", None, "in an epoch, each sample comes to one rank")

    def look_at_copies(self, shares):
        """Looks whether a data set is the same on all ranks, where they draw from the same one."""
        found = {share["inputs"] for share in shares}
        if not shares or any(share["shuffle"] is None for share in shares):
            return  # without a DistributedSampler, a rank may have data of its own
        if "" in found:
            self.say("unseen", None, "whether a sample is the same on all ranks")
        elif len(found) > 1:
            text = "samples are not the same on all ranks: each makes, splits or shuffles its data"
            self.say("wrong", shares[0], text, "your_project.md#what-to-check")
        elif len({share["targets"] for share in shares}) == 1:
            self.say("ok", None, "samples are the same on all ranks")

    def look_at_order(self, first, second):
        length = min(len(first["indices"]), len(second["indices"]))
        if length < 4 or None in first["indices"]:
            return
        if first["indices"][:length] != second["indices"][:length]:
            self.say("ok", None, "the order of the samples differs from epoch to epoch")
        elif first["shuffle"]:
            text = "each epoch has the same order: set_epoch is not called"
            self.say("wrong", first, text, SAMPLER)
        else:
            text = "each epoch has the same order: the samples are not shuffled"
            self.say("look", first, text, SAMPLER)

    def look_at_random_numbers(self, run, place):
        """Looks whether two ranks, or two data workers, make samples with equal random numbers."""
        files = [path.read_text().splitlines() for path in run.folder.glob("*.drawn")]
        counts = Counter(state for lines in files for state in set(lines))
        again = sorted({state.split()[0] for state in counts if counts[state] > 1})
        if again:
            text = f"ranks make their samples with the same random numbers, of {', '.join(again)}"
            self.say("look", place, text, "your_project.md#what-to-check")
