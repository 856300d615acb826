"""Plans offsets in one memory allocation for buffers with different lifetimes: integers only.

The first step shows which buffers are alive together, so each buffer gets a fixed offset from the
second one on. Four units, one of them gathered ahead::

    bytes  |  a a . c c c .     a and c are never alive together, so they share bytes;
           |  . b b b . d d     so do b and d
           +---------------- time

Finding the least memory is NP-hard (dynamic storage allocation, Garey & Johnson SR2). Here each
buffer goes to the lowest offset that no neighbor (a buffer that is ever alive with it) covers, in
a few orders. If none of them gets down to ``goal``, the best order is varied at random (from a
fixed seed), which is enough for transformers and for units of very different sizes (docs/log.md).
"""

import random
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["MemoryPlacement", "MemoryPlan", "place"]

_SEED = 0
_MAX_TRIES = 400
_MAX_WORK = 100_000  # tries times buffers: a few tenths of a second

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryPlacement:
    """The offset of each buffer, and the end of the last one, in bytes."""

    offsets: tuple[int, ...]
    extent: int


@dataclass(slots=True)
class MemoryPlan(Generic[Key]):
    """The offsets of buffers by key, and the observations that they are derived from.

    Call `observe` for every allocation of a step, then `update`. An allocation that was not
    observed before gets its offset at the next `update`.
    """

    offsets: Mapping[Key, int] = field(default_factory=dict)  # of the buffers that have one
    extent: int = 0  # the end of the last buffer
    _sizes: dict[Key, int] = field(default_factory=dict)
    _neighbors: dict[Key, set[Key]] = field(default_factory=dict)
    _unplaced: set[Key] = field(default_factory=set)  # observed since the last `update`

    @property
    def is_stale(self) -> bool:
        """Whether something new was observed since the last `update`."""
        return bool(self._unplaced)

    def observe(self, key: Key, size: int, alive: Collection[Key]) -> int | None:
        """Note that ``key`` is allocated while ``alive`` are. A key keeps its size.

        Returns:
            Its planned offset, which overlaps none of ``alive``; None if there is none yet.
        """
        if key not in self._sizes:
            self._unplaced.add(key)
        assert self._sizes.setdefault(key, size) == size
        neighbors = self._neighbors.setdefault(key, set())
        if not neighbors.issuperset(alive):
            neighbors.update(alive)
            for other in alive:
                self._neighbors[other].add(key)
            self._unplaced.add(key)
        return None if key in self._unplaced else self.offsets.get(key)

    def update(self, goal: int, limit: int) -> None:
        """Give all buffers new offsets, within ``goal`` bytes if possible.

        A buffer that would end beyond ``limit`` gets no offset.
        """
        keys = list(self._sizes)
        index = {key: i for i, key in enumerate(keys)}
        neighbors = [[index[other] for other in self._neighbors[key]] for key in keys]
        placement = place([self._sizes[key] for key in keys], neighbors, goal)
        placed = zip(keys, placement.offsets, strict=True)
        self.offsets = {key: start for key, start in placed if start + self._sizes[key] <= limit}
        self.extent = max((at + self._sizes[key] for key, at in self.offsets.items()), default=0)
        self._unplaced.clear()


def place(sizes: Sequence[int], neighbors: Sequence[Collection[int]], goal: int) -> MemoryPlacement:
    """Give each buffer an offset so that no two neighbors overlap.

    Args:
        sizes: the buffers' sizes in bytes.
        neighbors: for each buffer, the indices of those that are ever alive with it; symmetric.
        goal: the extent at which to stop trying: the most bytes that are alive at once.
    """
    orders = [
        sorted(range(len(sizes)), key=lambda i: -sizes[i]),
        sorted(range(len(sizes)), key=lambda i: -len(neighbors[i])),
        sorted(range(len(sizes)), key=lambda i: -sizes[i] * len(neighbors[i])),
        list(range(len(sizes))),
    ]
    order = min(orders, key=lambda order: _first_fit(sizes, neighbors, order).extent)
    best = _first_fit(sizes, neighbors, order)
    chance = random.Random(_SEED)
    tries = min(_MAX_TRIES, _MAX_WORK // max(1, len(sizes)))
    while best.extent > goal and tries:
        tries -= 1
        varied = list(order)
        earlier = chance.randrange(len(varied)) if chance.random() < 0.5 else 0  # noqa: PLR2004
        varied.insert(earlier, varied.pop(chance.randrange(len(varied))))
        found = _first_fit(sizes, neighbors, varied)
        if found.extent <= best.extent:
            order, best = varied, found
    return best


def _first_fit(
    sizes: Sequence[int], neighbors: Sequence[Collection[int]], order: Sequence[int]
) -> MemoryPlacement:
    offsets = [-1] * len(sizes)
    extent = 0
    for i in order:
        offset = 0
        for start, other in sorted((offsets[j], j) for j in neighbors[i] if offsets[j] >= 0):
            if start - offset >= sizes[i]:
                break
            offset = max(offset, start + sizes[other])
        offsets[i] = offset
        extent = max(extent, offset + sizes[i])
    return MemoryPlacement(tuple(offsets), extent)
