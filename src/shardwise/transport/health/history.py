"""The collectives that each rank has issued, compared between ranks.

NCCL pairs the collectives of a group in the order in which its ranks issue them. If two ranks run
different units of equal size, no rank waits, and all numbers from there on are wrong. So each rank
keeps a rolling hash of the labels of its collectives for each group. Neighbors in a group compare
their hashes at equal counts, every two seconds, on the heartbeat thread.
"""

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.transport.api import CollectiveId

__all__ = ["Entry", "History", "Mark", "Ranks", "first_difference"]

Ranks = tuple[int, ...]
Entry = tuple[int, int, str]  # number in its group, hash of all up to this one, and label
Mark = tuple[int, int]  # number and hash

_NUM_KEPT = 4096  # per group: more than a rank issues in the seconds until others compare


@dataclass(slots=True)
class History:
    """The last collectives of one queue, by the ranks that take part."""

    entries: dict[Ranks, deque[Entry]] = field(default_factory=dict)  # issued
    marks: dict[Ranks, Mark] = field(default_factory=dict)  # the last ones that ended

    def add(self, collective: CollectiveId) -> Mark:
        """Record that ``collective`` was issued."""
        if collective.ranks not in self.entries:
            self.entries[collective.ranks] = deque([(0, 0, "")], maxlen=_NUM_KEPT)
        entries = self.entries[collective.ranks]
        number, before, _ = entries[-1]
        text = f"{collective.label} {collective.slot_bytes}"
        mark = number + 1, zlib.crc32(text.encode(), before)
        entries.append((*mark, collective.label))
        return mark

    def differs(self, ranks: Ranks, mark: Mark) -> bool:
        """Whether another rank of ``ranks`` has issued other collectives up to its ``mark``.

        False if this rank no longer knows, or has not come so far: a later mark will tell, since
        hashes are cumulative.
        """
        number, digest = mark
        entries = self.entries[ranks].copy()
        position = number - entries[0][0]
        return 0 <= position < len(entries) and entries[position][1] != digest


def first_difference(own: Iterable[Entry], other: Iterable[Entry]) -> tuple[int, str, str] | None:
    """Return number and labels of the first collective that differs, if both ranks still know."""
    known = {number: (digest, label) for number, digest, label in other}
    for number, digest, label in own:
        if number in known and known[number][0] != digest:
            return number, label, known[number][1]
    return None
