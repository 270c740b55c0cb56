"""Numbers that a script logs: in which form, and of which losses they are the mean."""

import re

import pytest

from rankcheck.questions import log
from rankcheck.witness import details

LOSSES = [3.0, 1.0, 2.5, 0.5, 2.0, 1.5]
STEPS = [1, 2, 3, 4, 5, 6]
BARS = [
    f"\r {'#' * n} {n}/6 [00:0{n}<00:09, {n}.5it/s, loss={x:.4f}]" for n, x in enumerate(LOSSES)
]


def events_of(texts, monkeypatch):
    """Returns what is noted of these texts, of which one is printed after each backward pass."""
    events = []
    monkeypatch.setattr(details, "write", lambda **event: events.append(event))
    for passes, text in enumerate(texts, 1):
        for part in re.split(r"(?<= )", text):  # as print() writes
            details.note_text(part)
        for event in events:
            event.setdefault("passes", passes)
    return events


@pytest.mark.parametrize(
    "texts",
    [
        [f"loss {loss:.4f}" for loss in LOSSES],
        BARS,  # each has another form
        [last + bar for last, bar in zip(["", *BARS], BARS, strict=False)],  # it is drawn twice
    ],
)
def test_losses_are_found_in_each_form(monkeypatch, texts):
    columns = log.columns(events_of(texts, monkeypatch))
    ranks = [[[loss, 4] for loss in LOSSES]]
    spans = {
        label: log.span_of(numbers, ends, STEPS, [], ranks)
        for _, _, label, ends, numbers in columns
    }
    assert spans["loss"]


def averages(decay, losses):
    mean = 0.0
    for loss in losses:
        mean = decay * mean + (1 - decay) * loss
        yield mean


@pytest.mark.parametrize("unbiased", [False, True])
def test_a_moving_average_is_that_of_one_rank(unbiased):
    other = [loss + 0.3 * (-1) ** n for n, loss in enumerate(LOSSES)]
    ranks = [[[loss, 4] for loss in losses] for losses in (LOSSES, other)]
    means = [*averages(0.9, LOSSES)]
    if unbiased:
        means = [mean / (1 - 0.9**n) for n, mean in enumerate(means, 1)]
    printed = [f"{mean:.6f}" for mean in means]
    assert log.span_of(printed, STEPS, STEPS, [], ranks[:1])
    assert not log.span_of(printed, STEPS, STEPS, [], ranks)
