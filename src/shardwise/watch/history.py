"""The collectives that each rank has issued, compared between ranks.

NCCL pairs the collectives of a group in the order in which its ranks issue them. If two ranks run
different units of equal size, no rank waits, and all numbers from there on are wrong. So each rank
keeps a rolling hash of the labels of its collectives for each group. Neighbors in a group compare
their hashes at equal counts, every two seconds, on the heartbeat thread.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.comm.api import CollectiveId
from shardwise.errors import RanksDiverged
from shardwise.watch.monitor import Monitor
from shardwise.watch.status import SAME_UNITS

__all__ = ["Comparison", "History"]

Mark = tuple[int, int]  # number of a collective in its group, hash of all up to this one
_Ranks = tuple[int, ...]
_Entry = tuple[int, int, str]  # a mark and the label of the collective
_Place = tuple[int, _Ranks, int]  # queue, group and neighbor

_NUM_ATTEMPTS = 3  # to read the history of the other rank
_NUM_KEPT = 4096  # per group: more than a rank issues in the seconds until others compare


@dataclass(slots=True)
class History:
    """The last collectives of one queue, by the ranks that take part.

    It is a `shardwise.comm.api.QueueObserver`.
    """

    entries: dict[_Ranks, deque[_Entry]] = field(default_factory=dict)  # issued
    marks: dict[_Ranks, Mark] = field(default_factory=dict)  # the last ones that ended
    _running: deque[Mark] = field(default_factory=deque)  # of those that have not ended

    def issued(self, collective: CollectiveId) -> None:
        """Note that ``collective`` was issued."""
        if collective.ranks not in self.entries:
            self.entries[collective.ranks] = deque([(0, 0, "")], maxlen=_NUM_KEPT)
        entries = self.entries[collective.ranks]
        number, before, _ = entries[-1]
        text = f"{collective.label} {collective.slot_bytes}"
        mark = number + 1, zlib.crc32(text.encode(), before)
        entries.append((*mark, collective.label))
        self._running.append(mark)

    def ended(self, collective: CollectiveId) -> None:
        """Note that ``collective``, the first of those that run, has ended."""
        self.marks[collective.ranks] = self._running.popleft()

    def differs(self, ranks: _Ranks, mark: Mark) -> bool:
        """Whether another rank of ``ranks`` has issued other collectives up to its ``mark``.

        False if this rank no longer knows, or has not come so far: a later mark will tell, since
        hashes are cumulative.
        """
        number, digest = mark
        entries = self.entries[ranks].copy()
        position = number - entries[0][0]
        return 0 <= position < len(entries) and entries[position][1] != digest


class Comparison:
    """Compares this rank's histories, one per queue, with its neighbors' in each group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._attempts = 0
        self._found: _Place | None = None

    def look(
        self, monitor: Monitor, histories: Sequence[History], epoch: int
    ) -> RanksDiverged | None:
        """Compare the last heartbeats; return the error to raise, if there is one.

        Both neighbors find a difference. They publish their histories for each other, so the
        error, a few looks later, has the labels of both.
        """
        if self._found is None:
            places = self._places(histories)
            differing = (p for p in places if self._differs(monitor, histories[p[0]], p, epoch))
            self._found = next(differing, None)
        if self._found is None:
            return None
        queue, ranks, other = self._found
        entries = tuple(_copy(history) for history in histories)
        shown = monitor.swap_histories(other, _Shown(epoch, entries))
        self._attempts += 1
        answers = () if shown is None or shown.epoch != epoch else shown.queues
        if not answers and self._attempts < _NUM_ATTEMPTS:
            return None
        # Of another queue, say that of reductions, it may be known earlier that ranks differ.
        pairs = zip(entries, answers, strict=False)
        found = (
            _difference(self._rank, other, a.get(ranks, ()), b.get(ranks, ())) for a, b in pairs
        )
        number, _, label = entries[queue][ranks][-1]
        unknown = f"they differ before collective {number}, {label} on rank {self._rank}"
        labels = next(filter(None, found), unknown)
        return RanksDiverged(
            f"ranks {', '.join(map(str, sorted((self._rank, other))))} run different units, whose "
            f"collectives have equal sizes, so the numbers of both are wrong: {labels}\n"
            f"{monitor.table()}\n{SAME_UNITS}"
        )

    def _places(self, histories: Sequence[History]) -> Iterator[_Place]:
        for queue, history in enumerate(histories):
            for ranks in list(history.entries):
                at = ranks.index(self._rank)
                for other in {ranks[at - 1], ranks[(at + 1) % len(ranks)]} - {self._rank}:
                    yield queue, ranks, other

    def _differs(self, monitor: Monitor, history: History, place: _Place, epoch: int) -> bool:
        queue, ranks, other = place
        beat = monitor.heartbeat(other)
        if beat is None or beat.epoch != epoch or len(beat.marks) <= queue:
            return False
        mark = beat.marks[queue].get(ranks)
        return mark is not None and history.differs(ranks, mark)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What a rank publishes for its neighbor: the entries of each queue."""

    epoch: int
    queues: tuple[Mapping[_Ranks, tuple[_Entry, ...]], ...]


def _copy(history: History) -> dict[_Ranks, tuple[_Entry, ...]]:
    return {ranks: tuple(entries.copy()) for ranks, entries in history.entries.copy().items()}


def _difference(rank: int, other: int, own: Sequence[_Entry], others: Sequence[_Entry]) -> str:
    """Describe the first collective that differs; empty if both ranks know none."""
    known = {number: (digest, label) for number, digest, label in others}
    for number, digest, label in own:
        if number in known and known[number][0] != digest:
            (one, at_one), (two, at_two) = sorted(((rank, label), (other, known[number][1])))
            return f"collective {number} is {at_one} on rank {one} and {at_two} on rank {two}"
    return ""
