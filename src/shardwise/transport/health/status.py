"""The reports that ranks publish when a wait takes long, and the verdict on them.

This costs a healthy step nothing: a rank publishes only once it has waited for a second. It then
puts a `Report` into the job's store, reads the others', and asks `verdict`. A report is published
at every *look* at a wait, so a report that stays the same over two looks is a rank that is stuck.

No rank can go on if none of them moves and no exchange that runs was begun by all its ranks: what
all have begun will end, however slow the network.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import PeerAborted, PeerLost, PeerSilent, RanksDiverged, StepError
from shardwise.transport.api import CollectiveId

__all__ = ["QueueState", "RecentUnits", "Report", "verdict"]

LOOKS = 2
_ERRORS = {kind.__name__: kind for kind in (PeerAborted, RanksDiverged, PeerLost, PeerSilent)}
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
    num_entered: int = 0  # units that were begun in this step
    entered: tuple[str, ...] = ()  # the last of them

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "Report":
        fields = json.loads(text)
        fields["entered"] = tuple(fields["entered"])
        fields["queues"] = tuple(
            QueueState(queue["issued"], _collective(queue["running"]), tuple(queue["ended"]))
            for queue in fields["queues"]
        )
        return Report(**fields)


def _collective(fields: dict[str, Any] | None) -> CollectiveId | None:
    return None if fields is None else CollectiveId(**{**fields, "ranks": tuple(fields["ranks"])})


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
