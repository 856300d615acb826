"""Where memory that is asked for over and over lies in one piece: integers only.

The requests of a training step are the same in every step, so their places can be worked out once.
Three of them, and a piece of memory as large as what is in use at once::

    bytes  |  aaaa      ccccccc
           |  aaaa  bb  ccccccc
           |        bb
           +------------------- time

Finding the least memory is NP-hard (dynamic storage allocation, Garey & Johnson SR2). Here each
span goes to the lowest place that is free while it lives, in a few orders; if none of them gets
down to what is in use at once, the best order is varied at random (from a fixed seed), which is
enough for the steps of transformers and of units of unlike sizes (docs/log.md).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Placement", "Span", "most_at_once", "place"]

_SEED = 0
_MOST_TRIES = 400
_MOST_WORK = 100_000  # tries times spans: some tenths of a second


@dataclass(frozen=True, slots=True)
class Span:
    """``size`` bytes that are in use from tick ``start`` until tick ``stop``."""

    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each span begins, in bytes, and how many bytes they take together."""

    offsets: tuple[int, ...]
    extent: int


def most_at_once(spans: Sequence[Span]) -> int:
    """The most bytes in use at any moment: no placement takes less."""
    changes = [(span.start, span.size) for span in spans] + [(s.stop, -s.size) for s in spans]
    held = most = 0
    for _, change in sorted(changes):  # at one tick, what ends before what begins
        held += change
        most = max(most, held)
    return most


def place(spans: Sequence[Span]) -> Placement:
    """Give each span a place that no other has while it lives."""
    goal = most_at_once(spans)
    rivals = _rivals(spans)
    orders = [
        sorted(range(len(spans)), key=lambda i: -spans[i].size),
        sorted(range(len(spans)), key=lambda i: spans[i].start - spans[i].stop),
        sorted(range(len(spans)), key=lambda i: spans[i].size * (spans[i].start - spans[i].stop)),
        list(range(len(spans))),
    ]
    order = min(orders, key=lambda order: _first_fit(spans, rivals, order).extent)
    best = _first_fit(spans, rivals, order)
    chance = random.Random(_SEED)
    tries = min(_MOST_TRIES, _MOST_WORK // max(1, len(spans)))
    while best.extent > goal and tries:
        tries -= 1
        varied = list(order)
        earlier = chance.randrange(len(varied)) if chance.random() < 0.5 else 0  # noqa: PLR2004
        varied.insert(earlier, varied.pop(chance.randrange(len(varied))))
        found = _first_fit(spans, rivals, varied)
        if found.extent <= best.extent:
            order, best = varied, found
    return best


def _rivals(spans: Sequence[Span]) -> list[list[int]]:
    """For each span those that live while it does."""
    rivals: list[list[int]] = [[] for _ in spans]
    alive: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: spans[i].start):
        alive = [j for j in alive if spans[j].stop > spans[i].start]
        for j in alive:
            rivals[i].append(j)
            rivals[j].append(i)
        alive.append(i)
    return rivals


def _first_fit(
    spans: Sequence[Span], rivals: Sequence[Sequence[int]], order: Sequence[int]
) -> Placement:
    offsets = [-1] * len(spans)
    extent = 0
    for i in order:
        at = 0
        for start, rival in sorted((offsets[j], j) for j in rivals[i] if offsets[j] >= 0):
            if start - at >= spans[i].size:
                break
            at = max(at, start + spans[rival].size)
        offsets[i] = at
        extent = max(extent, at + spans[i].size)
    return Placement(tuple(offsets), extent)
