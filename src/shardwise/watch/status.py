"""The reports that ranks publish during a long wait, and the verdict on them.

A healthy step publishes nothing. A rank that waits looks once per second whether anything has
changed; a rank whose state is the same over two *looks* is stuck. It puts a `Report` into the job's
store, and the last rank to get stuck reads the reports of all and calls `verdict`.

No rank can go on if all are stuck, no running exchange was begun by all its ranks (one that all
have begun will end, however slow the network is), and no queue is about to begin one (its thread
may be waiting for a processor). A rank inside a collective of torch is stuck if a rank of this
collective waits here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType

from shardwise.comm.queue import QueueState
from shardwise.errors import PeerAborted, PeerLost, PeerSilent, RanksDiverged, StepError, ranges

__all__ = ["SAME_UNITS", "LookCounter", "Report", "table", "verdict"]

SAME_UNITS = (
    "Every rank must run the same units in the same order, and train the same parameters; look for "
    "a branch, a loop length, requires_grad or an exception that differs by rank. Every "
    "rank must also call sw.save, sw.clip_grad_norm_ and other collective functions. Modules that "
    "only some ranks need, such as a vision tower for batches with images, belong in a unit that "
    "all ranks run: none of their blocks may be a unit."
)
LOOKS = 2
_MAX_ROWS = 32  # of a table; of more ranks, equal ones share a row
_ERRORS = {kind.__name__: kind for kind in (PeerAborted, RanksDiverged, PeerLost, PeerSilent)}


class LookCounter:
    """Counts consecutive looks at which a state was the same as at the look before."""

    def __init__(self) -> None:
        self.count = 0
        self._last: object = None

    def look(self, state: object, *, has_moved: bool = False) -> int:
        """Return the new count: 0 if ``state`` differs from the last one or ``has_moved``."""
        self.count = self.count + 1 if state == self._last and not has_moved else 0
        self._last = state
        return self.count


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rank is, and the error that all ranks must raise, if there is one."""

    epoch: int
    looks: int  # without progress
    step: int
    where: str
    queues: tuple[QueueState, ...]
    failure: str = ""  # class name of the error
    error: str = ""  # its message; without a failure, why this rank's process ended
    entered: tuple[tuple[int, str], ...] = ()  # the last calls of units in this step, numbered
    awaited: str = ""  # label of a collective
    python: tuple[str, ...] = ()  # calls, innermost first
    blocked_with: tuple[int, ...] = ()  # the ranks of a torch collective that this one is in
    is_host_busy: bool = False  # its main thread runs, while its device waits
    # In a heartbeat: its number, and the `History.marks` of each queue of a device. (Exchanges on
    # the host compare tags instead.)
    count: int = 0
    marks: tuple[Mapping[tuple[int, ...], tuple[int, int]], ...] = ()

    @property
    def is_stuck(self) -> bool:
        """Whether the rank has not moved between two looks."""
        return self.looks >= LOOKS

    @property
    def raised(self) -> StepError:
        """The error that all ranks must raise."""
        return _ERRORS.get(self.failure, PeerAborted)(self.error)

    def fits(self, num_ranks: int) -> bool:
        """Whether all ranks that it names are among ``num_ranks``."""
        running = [state.running.ranks for state in self.queues if state.running is not None]
        groups = [self.blocked_with, *running]
        return all(min(group) >= 0 and max(group) < num_ranks for group in groups if group)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of this rank in the table."""
        last = "; ".join(state.last for state in self.queues if state.last)
        awaited = self.awaited or ("a collective of torch" if self.blocked_with else "-")
        python = self.python[0] if self.python else "-"
        return str(self.step), self.where, last or "-", awaited, python


def verdict(reports: Sequence[Report | None], epoch: int) -> StepError | None:
    """Return the error to raise on every rank, or None if the ranks may still go on.

    ``reports`` are those of all ranks; those of other epochs are ignored.
    """
    current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
    if len({len(report.queues) for report in current.values()}) > 1:
        return None  # one of them is not of this job
    if len(current) < len(reports) or not all(report.is_stuck for report in current.values()):
        return None
    if _can_move(current):
        return None
    return RanksDiverged(
        f"ranks wait for different things, so none can go on:\n{table(current)}"
        + _first_difference(current)
        + f"\n{SAME_UNITS}"
    )


def table(reports: Mapping[int, Report], remarks: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return a table of the positions of ranks; a rank in ``remarks`` no longer runs.

    Many ranks at one position share a row, so that the message of a job of thousands can be read.
    """
    ranks_at: dict[tuple[str, ...], list[int]] = {}
    shares = len(reports) > _MAX_ROWS
    for rank in sorted({*reports, *remarks}):
        cells = reports[rank].cells if rank in reports else ("-",) * 5
        if rank in remarks:
            cells = *cells[:-1], f"{remarks[rank]}; was at {cells[-1]}"
        ranks_at.setdefault(("" if shares else str(rank), *cells), []).append(rank)
    rarest = sorted(ranks_at.items(), key=lambda item: len(item[1]))[:_MAX_ROWS]
    rows: list[tuple[str, ...]] = [("rank", "step", "in", "last completed", "waits for", "Python")]
    rows += [(ranges(ranks), *cells[1:]) for cells, ranks in sorted(rarest, key=itemgetter(1))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    return "\n".join(
        "  ".join(["", *(cell.ljust(width) for cell, width in line)]).rstrip() for line in lines
    )


def _can_move(reports: Mapping[int, Report]) -> bool:
    """Whether some exchange is about to begin, or is running and was begun by all its ranks."""
    waiting = {
        rank for rank, report in reports.items() if not (report.blocked_with or report.is_host_busy)
    }
    if any(r.blocked_with and waiting.isdisjoint(r.blocked_with) for r in reports.values()):
        return True  # its collective may still end
    if any(state.is_about_to_begin for report in reports.values() for state in report.queues):
        return True
    return any(
        all(reports[rank].queues[number].has_begun(state.running) for rank in state.running.ranks)
        for report in reports.values()
        for number, state in enumerate(report.queues)
        if state.running is not None
    )


def _first_difference(reports: Mapping[int, Report]) -> str:
    """Describe the first call in which the ranks entered different units, or return ""."""
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
