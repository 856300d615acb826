"""The reports that ranks publish when a wait takes long, and the verdict on them.

This costs a healthy step nothing: a rank publishes only once it has waited for a second. It then
puts a `Report` into the job's store, reads the others', and asks `verdict`. A report is published
at every *look* at a wait, so a report that stays the same over two looks is a rank that is stuck.

No rank can go on if none of them moves, no exchange that runs was begun by all its ranks (what all
have begun will end, however slow the network), and no queue is about to begin one: the thread that
does may be waiting for a processor. A rank that is inside a collective of torch's with one that
waits here does not move either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.errors import PeerAborted, PeerLost, PeerSilent, RanksDiverged, StepError
from shardwise.transport.api import CollectiveId

__all__ = ["QueueState", "Report", "table", "verdict"]

LOOKS = 2
_ERRORS = {kind.__name__: kind for kind in (PeerAborted, RanksDiverged, PeerLost, PeerSilent)}


@dataclass(frozen=True, slots=True)
class QueueState:
    """How far a rank has come in one queue of collectives."""

    issued: int
    begun: int  # of these
    running: CollectiveId | None
    ended: tuple[int, ...]  # tags of the last ones
    last: str = ""  # label of the last of these

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
    error: str = ""  # its text; without a failure, what ended this rank's process
    entered: tuple[tuple[int, str], ...] = ()  # the last calls of units in this step, numbered
    awaited: str = ""  # label of a collective
    python: tuple[str, ...] = ()  # calls, innermost first
    blocked_with: tuple[int, ...] = ()  # ranks of a collective of torch's in which this one is
    is_host_busy: bool = False  # while its device waits

    @property
    def is_stuck(self) -> bool:
        """Whether it has not moved between two looks."""
        return self.looks >= LOOKS

    @property
    def raised(self) -> StepError:
        """The error that all ranks are to raise."""
        return _ERRORS[self.failure](self.error)

    @property
    def cells(self) -> tuple[str, ...]:
        """Of its row of the table of ranks."""
        last = "; ".join(state.last for state in self.queues if state.last)
        awaited = self.awaited or ("a collective of torch" if self.blocked_with else "-")
        python = self.python[0] if self.python else "-"
        return str(self.step), self.where, last or "-", awaited, python


def verdict(reports: Sequence[Report | None], epoch: int) -> StepError | None:
    """The error to raise on every rank, or None if the ranks may still go on.

    Args:
        reports: of all ranks.
        epoch: reports of an earlier one are ignored.
    """
    current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
    for report in current.values():
        if report.failure:
            return report.raised
    if len(current) < len(reports) or not all(report.is_stuck for report in current.values()):
        return None
    if _can_move(current):
        return None
    return RanksDiverged(
        f"ranks wait for different things, so none can go on:\n{table(current)}"
        + _first_difference(current)
        + "\nEvery rank must run the same units in the same order; look for a branch, a loop "
        "length or an exception that differs by rank."
    )


def table(reports: Mapping[int, Report], remarks: Mapping[int, str] = MappingProxyType({})) -> str:
    """Where each rank stands; ``remarks`` are of those that do not."""
    rows: list[tuple[str, ...]] = [("rank", "step", "in", "last completed", "waits for", "Python")]
    for rank in sorted({*reports, *remarks}):
        cells = reports[rank].cells if rank in reports else ("-",) * 5
        remark = (f"{remarks[rank]}; was at {cells[-1]}",) if rank in remarks else cells[-1:]
        rows.append((str(rank), *cells[:-1], *remark))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(["", *(cell.ljust(width) for cell, width in line)]).rstrip() for line in lines
    )


def _can_move(reports: Mapping[int, Report]) -> bool:
    """Whether some exchange is about to begin, or was begun by all its ranks and runs."""
    waiting = {
        rank for rank, report in reports.items() if not (report.blocked_with or report.is_host_busy)
    }
    if any(r.blocked_with and waiting.isdisjoint(r.blocked_with) for r in reports.values()):
        return True  # for all that is known here
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
