"""The collectives that each rank has issued, to be compared between ranks.

NCCL pairs the collectives of a group in the order in which its ranks issue them. If two ranks run
different units of equal size, nothing waits in vain, and every number from there on is wrong. So
each rank keeps a rolling hash of the labels of its collectives for each group. Neighbors in a
group compare them at equal counts, every two seconds, on the thread of the heartbeat.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.transport.api import CollectiveId

__all__ = ["Entry", "History", "Mark", "Ranks", "first_difference"]

Ranks = tuple[int, ...]
Entry = tuple[int, int, str]  # number in its group, hash of all up to it, and label
Mark = tuple[int, int]  # number and hash

_NUM_KEPT = 4096  # of a group: what a rank issues in the seconds until others compare


@dataclass(slots=True)
class History:
    """The last collectives of one queue, by the ranks that took part in them."""

    entries: dict[Ranks, deque[Entry]] = field(default_factory=dict)
    _num_ended: dict[Ranks, int] = field(default_factory=dict)

    def note(self, collective: CollectiveId) -> None:
        """Add a collective that was issued."""
        if collective.ranks not in self.entries:
            self.entries[collective.ranks] = deque([(0, 0, "")], maxlen=_NUM_KEPT)
            self._num_ended[collective.ranks] = 0
        entries = self.entries[collective.ranks]
        number, before, _ = entries[-1]
        text = f"{collective.label} {collective.slot_bytes}"
        entries.append((number + 1, zlib.crc32(text.encode(), before), collective.label))

    def end(self, collective: CollectiveId) -> None:
        """The oldest collective under way has ended."""
        self._num_ended[collective.ranks] += 1

    def marks(self) -> dict[Ranks, Mark]:
        """The last collectives that ended, to be shown to others; any thread may call this."""
        marks: dict[Ranks, Mark] = {}
        for ranks, number in self._num_ended.copy().items():
            entries = self.entries[ranks].copy()
            position = number - entries[0][0]
            if position >= 0:
                marks[ranks] = entries[position][:2]
        return marks

    def agrees(self, ranks: Ranks, mark: Mark) -> bool | None:
        """Whether another rank has issued the same up to its ``mark``.

        None if this rank has not come so far. What is too old to be known agrees.
        """
        number, digest = mark
        entries = self.entries[ranks].copy()
        position = number - entries[0][0]
        if position >= len(entries):
            return None
        return position < 0 or entries[position][1] == digest


def first_difference(own: Iterable[Entry], other: Iterable[Entry]) -> tuple[int, str, str] | None:
    """Number and labels of the first collective in which two ranks differ, if both still know."""
    known = {number: (digest, label) for number, digest, label in other}
    for number, digest, label in own:
        if number in known and known[number][0] != digest:
            return number, label, known[number][1]
    return None
