"""Events with their times, and the timeline of a step that they make."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from shardwise.schedule.events import Event, EventKind, describe
from shardwise.transport.api import Work

__all__ = ["Record", "trace_events"]

_COMPUTE = (EventKind.FORWARD, EventKind.BACKWARD)
_WAITS = (EventKind.WAIT, EventKind.FINISH_REDUCE, EventKind.STEP)
_ROWS = {
    EventKind.GATHER: "gather",
    EventKind.RESHARD_TO_SUBGROUP: "gather",
    EventKind.REDUCE: "reduce",
}


@dataclass(slots=True)
class Record:
    """One event that took place.

    Times are seconds of `time.perf_counter`, of the stream that computes: floats, or events of a
    device that are converted to floats when they have taken place.
    """

    event: Event
    step: int
    began: SupportsFloat
    ended: SupportsFloat = 0.0
    works: tuple[Work, ...] = ()  # the communication that it launched

    @property
    def seconds(self) -> float:
        """How long it took; for a wait, exposed communication."""
        return float(self.ended) - float(self.began)

    @property
    def busy_seconds(self) -> float:
        """How long the communication that it launched ran."""
        return sum(ended - began for began, ended in (work.span for work in self.works))


def trace_events(records: Sequence[Record], labels: Sequence[str]) -> Iterable[dict[str, Any]]:
    """The events of a Chrome trace: a row of compute and waits, one of gathers, one of reductions.

    Args:
        records: of one step.
        labels: of the plan's units.
    """
    if not records:
        return
    origin = float(records[0].began)
    computes = [r for r in records if r.event.kind in _COMPUTE]
    ends = [r.began for r in computes[1:]] + [records[-1].ended] if computes else []
    spans: list[tuple[str, Record, SupportsFloat, SupportsFloat]] = [
        ("compute", r, r.ended, end) for r, end in zip(computes, ends, strict=True)
    ]
    for record in records:
        if record.event.kind in _ROWS:
            row = _ROWS[record.event.kind]
            spans += [(row, record, *work.span) for work in record.works]
        elif record.event.kind in _WAITS:
            spans.append(("compute", record, record.began, record.ended))
    for row, record, start, stop in spans:
        yield {
            "name": describe(record.event, labels),
            "cat": record.event.kind.value,
            "ph": "X",
            "pid": 0,
            "tid": row,
            "ts": (float(start) - origin) * 1e6,
            "dur": max(0.0, float(stop) - float(start)) * 1e6,
            "args": {"bytes": record.event.bytes},
        }
