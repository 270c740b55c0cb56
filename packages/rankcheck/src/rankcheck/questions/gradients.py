"""Compares gradients by their products with a fixed vector: see witness/details.py."""

from itertools import pairwise

ROUNDING = 1e-4  # of a gradient's product, relative to the largest


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


def is_plain_mean(step):
    """Whether the ranks' gradients are the mean of their own, which nothing clips or divides."""
    own, used = known_products(step)
    count = len(own) * (step[0]["scale"] or 1)  # the scaler's
    means = [sum(values) / count for values in zip(*own, strict=True)]
    scale = max(map(abs, means), default=0)
    return scale > 0 and all(close(products, means, scale) for products in used)


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
