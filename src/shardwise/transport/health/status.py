"""The reports that ranks publish when a wait takes long, and the verdict on them.

This costs a healthy step nothing: a rank publishes only once it has waited for a second. It then
puts a `Report` into the job's store, reads the others', and asks `verdict`. A report is published
at every *look* at a wait, so a report that stays the same over two looks is a rank that is stuck.

No rank can go on if none of them moves and no exchange that runs was begun by all its ranks: what
all have begun will end, however slow the network.
"""

import contextlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torch.distributed.distributed_c10d import Store

from shardwise.errors import PeerAborted, PeerLost, RanksDiverged, StepError
from shardwise.transport.api import CollectiveId

__all__ = ["Failure", "QueueState", "RecentUnits", "Report", "StatusStore", "verdict"]

LOOKS = 2
RECENT_UNITS = 64  # a rank stalls a few units after it took another way than the others


@dataclass(frozen=True, slots=True)
class QueueState:
    """How far a rank has come in one queue of collectives."""

    issued: int
    running: CollectiveId | None
    ended: tuple[int, ...]  # tags of the last ones

    def has_begun(self, collective: CollectiveId) -> bool:
        return collective.tag in self.ended or (
            self.running is not None and self.running.tag == collective.tag
        )


class RecentUnits:
    """The units whose forwards a rank began in the step under way, in order."""

    def __init__(self) -> None:
        self._step = 0
        self._units: deque[str] = deque(maxlen=RECENT_UNITS)
        self.num_entered = 0

    @property
    def entered(self) -> tuple[str, ...]:
        """The last of them."""
        return tuple(self._units)

    def append(self, step: int, unit: str) -> None:
        if step != self._step:
            self.clear()
            self._step = step
        self._units.append(unit)
        self.num_entered += 1

    def clear(self) -> None:
        self._units.clear()
        self.num_entered = 0


class Failure(StrEnum):
    """What made a rank give up."""

    RAISED = "raised"  # it raised
    ABORTED = "aborted"  # another rank raised
    DIVERGED = "diverged"  # ranks wait for different things
    LOST = "lost"  # a connection broke
    SILENT = "silent"  # a process gives no sign of life, and may come back

    @staticmethod
    def of(error: BaseException) -> "Failure":
        """Of an error that other ranks have not published."""
        return Failure.LOST if isinstance(error, PeerLost) else Failure.RAISED


@dataclass(frozen=True, slots=True)
class Report:
    """Where one rank stands, and why it gave up, if it did.

    ``entered`` are the last of ``num_entered`` units that it began in this step.
    """

    epoch: int
    looks: int
    step: int
    where: str
    queues: tuple[QueueState, ...]
    failure: Failure | None = None
    error: str = ""
    num_entered: int = 0
    entered: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Report":
        fields = json.loads(text)
        fields["queues"] = tuple(map(_queue_state, fields["queues"]))
        fields["entered"] = tuple(fields["entered"])
        fields["failure"] = fields["failure"] and Failure(fields["failure"])
        return Report(**fields)


def _queue_state(fields: dict[str, Any]) -> QueueState:
    running = fields["running"]
    if running is not None:
        running = CollectiveId(**{**running, "ranks": tuple(running["ranks"])})
    return QueueState(fields["issued"], running, tuple(fields["ended"]))


class StatusStore:
    """The reports of one group's ranks, in a store that all of them can read."""

    def __init__(self, store: Store, name: str, rank: int, size: int) -> None:
        self._store = store
        self._keys = [f"shardwise/{name}/{other}" for other in range(size)]
        self._own = self._keys[rank]

    def publish(self, report: Report) -> None:
        """Show ``report`` to the others.

        Raises:
            PeerLost: the process that holds the store is gone; so does `read`.
        """
        with store_errors():
            self._store.set(self._own, report.to_json())

    def read(self) -> list[Report | None]:
        """The last report of every rank, None for those that never published one."""
        with store_errors():
            return [
                Report.from_json(self._store.get(key)) if self._store.check([key]) else None
                for key in self._keys
            ]


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raise a PeerLost where the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the process that holds the job's store is gone: {error}") from error


def verdict(reports: Sequence[Report | None], epoch: int) -> tuple[Failure, StepError] | None:
    """The error to raise on every rank, or None if the ranks may still go on.

    Args:
        reports: of all ranks.
        epoch: reports of an earlier one are ignored.
    """
    current = {rank: r for rank, r in enumerate(reports) if r is not None and r.epoch == epoch}
    for rank, report in current.items():
        if report.failure is not None:
            return _relay(rank, report, report.failure)
    if len(current) < len(reports) or any(report.looks < LOOKS for report in current.values()):
        return None
    if _can_move(current):
        return None
    places = (f"  rank {rank}: step {r.step}, {r.where}" for rank, r in current.items())
    return Failure.DIVERGED, RanksDiverged(
        "ranks wait for different things, so none can go on:\n"
        + "\n".join(places)
        + _first_difference(current)
        + "\nEvery rank must run the same units in the same order; look for a branch, a loop "
        "length or an exception that differs by rank."
    )


def _relay(rank: int, report: Report, failure: Failure) -> tuple[Failure, StepError]:
    match failure:
        case Failure.RAISED:
            text = f"rank {rank} gave up in step {report.step}: {report.error}"
            return Failure.ABORTED, PeerAborted(text)
        case Failure.ABORTED:
            return failure, PeerAborted(report.error)
        case Failure.DIVERGED:
            return failure, RanksDiverged(report.error)
        case _:
            return failure, PeerLost(report.error)


def _can_move(reports: Mapping[int, Report]) -> bool:
    """Whether some exchange that runs was begun by all its ranks."""
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
    skipped = {rank: r.num_entered - len(r.entered) for rank, r in reports.items()}
    end = min(report.num_entered for report in reports.values())
    for position in range(max(skipped.values()), end):
        by_unit: dict[str, list[str]] = {}
        for rank, report in reports.items():
            unit = report.entered[position - skipped[rank]]
            by_unit.setdefault(unit, []).append(str(rank))
        if len(by_unit) > 1:
            units = (f"rank {', '.join(ranks)} entered {unit}" for unit, ranks in by_unit.items())
            return f"\nThey differ from call {position + 1} of the step on: {'; '.join(units)}."
    return ""
