"""The reports that ranks publish when a wait takes long, and the verdict on them.

This costs a healthy step nothing: a rank publishes only once it has waited for a second. It then
puts a `Report` into the job's store, reads the others', and asks `verdict`. A report is published
at every *look* at a wait, so a report that stays the same over two looks is a rank that is stuck.

No rank can go on if none of them moves, no exchange that runs was begun by all its ranks (what all
have begun will end, however slow the network), and no queue is about to begin one: the thread that
does may be waiting for a processor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PeerAborted, PeerLost, PeerSilent, RanksDiverged, StepError
from shardwise.transport.api import CollectiveId

__all__ = ["QueueState", "Report", "verdict"]

LOOKS = 2
_ERRORS = {kind.__name__: kind for kind in (PeerAborted, RanksDiverged, PeerLost, PeerSilent)}


@dataclass(frozen=True, slots=True)
class QueueState:
    """How far a rank has come in one queue of collectives."""

    issued: int
    begun: int  # of these
    running: CollectiveId | None
    ended: tuple[int, ...]  # tags of the last ones

    @property
    def is_about_to_begin(self) -> bool:
        return self.running is None and self.begun < self.issued

    def has_begun(self, collective: CollectiveId) -> bool:
        return collective.tag in self.ended or (
            self.running is not None and self.running.tag == collective.tag
        )


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rank stands, and the error that all ranks are to raise, if there is one."""

    epoch: int
    looks: int
    step: int
    where: str
    queues: tuple[QueueState, ...]
    failure: str = ""  # the name of its class
    error: str = ""
    entered: tuple[tuple[int, str], ...] = ()  # the last calls of units in this step, numbered


def verdict(reports: Sequence[Report | None], epoch: int) -> StepError | None:
    """The error to raise on every rank, or None if the ranks may still go on.

    Args:
        reports: of all ranks.
        epoch: reports of an earlier one are ignored.
    """
    current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
    for report in current.values():
        if report.failure:
            return _ERRORS[report.failure](report.error)
    if len(current) < len(reports) or any(report.looks < LOOKS for report in current.values()):
        return None
    if _can_move(current):
        return None
    places = (f"  rank {rank}: step {r.step}, {r.where}" for rank, r in current.items())
    return RanksDiverged(
        "ranks wait for different things, so none can go on:\n"
        + "\n".join(places)
        + _first_difference(current)
        + "\nEvery rank must run the same units in the same order; look for a branch, a loop "
        "length or an exception that differs by rank."
    )


def _can_move(reports: Mapping[int, Report]) -> bool:
    """Whether some exchange is about to begin, or was begun by all its ranks and runs."""
    if any(state.is_about_to_begin for report in reports.values() for state in report.queues):
        return True
    return any(
        all(reports[rank].queues[number].has_begun(state.running) for rank in state.running.ranks)
        for report in reports.values()
        for number, state in enumerate(report.queues)
        if state.running is not None
    )


def _first_difference(reports: Mapping[int, Report]) -> str:
    """The first units in which the ranks differ, if they do."""
    if len({report.step for report in reports.values()}) > 1:
        return ""
    entered = {rank: dict(report.entered) for rank, report in reports.items()}
    for call in sorted(set.intersection(*map(set, entered.values()))):
        by_unit: dict[str, list[str]] = {}
        for rank, units in entered.items():
            by_unit.setdefault(units[call], []).append(str(rank))
        if len(by_unit) > 1:
            ways = (f"rank {', '.join(ranks)} entered {unit}" for unit, ranks in by_unit.items())
            return f"\nThey differ from call {call} of the step on: {'; '.join(ways)}."
    return ""
