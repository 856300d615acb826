"""Compares the collectives that ranks have issued; see `history`."""

from collections.abc import Iterator, Sequence

from shardwise.errors import RanksDiverged
from shardwise.transport.health.history import Entry, History, Ranks, first_difference
from shardwise.transport.health.monitor import Monitor

__all__ = ["Comparison"]

_NUM_ATTEMPTS = 3  # to read the history of the other rank
_Place = tuple[int, Ranks, int]  # queue, group and neighbor


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
        entries = [_copy(history) for history in histories]
        shown = monitor.swap_histories(other, (epoch, entries))
        self._attempts += 1
        is_answer = shown is not None and shown[0] == epoch
        if not is_answer and self._attempts < _NUM_ATTEMPTS:
            return None
        others = shown[1][queue].get(ranks, []) if is_answer else []
        labels = _labels(self._rank, other, entries[queue][ranks], others)
        return RanksDiverged(
            f"ranks {', '.join(map(str, sorted((self._rank, other))))} run different units, whose "
            f"collectives have equal sizes, so the numbers of both are wrong: {labels}\n"
            f"{monitor.table()}\nEvery rank must run the same units in the same order; look for "
            "a branch or a loop length that differs by rank."
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
        if beat is None or beat.report.epoch != epoch or len(beat.marks) <= queue:
            return False
        mark = beat.marks[queue].get(ranks)
        return mark is not None and history.differs(ranks, mark)


def _copy(history: History) -> dict[Ranks, list[Entry]]:
    return {ranks: list(entries.copy()) for ranks, entries in history.entries.copy().items()}


def _labels(rank: int, other: int, own: Sequence[Entry], others: Sequence[Entry]) -> str:
    difference = first_difference(own, others)
    if difference is None:
        return f"they differ before collective {own[-1][0]}, {own[-1][2]} on rank {rank}"
    number, own_label, others_label = difference
    (one, at_one), (two, at_two) = sorted(((rank, own_label), (other, others_label)))
    return f"collective {number} is {at_one} on rank {one} and {at_two} on rank {two}"
