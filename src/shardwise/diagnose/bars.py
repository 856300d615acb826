"""The timeline of a recorded step: what each stream of a rank did, and when.

A rank has three tracks: compute (with its waits and the spans around the steps), gathers, and
reductions. A unit's compute lasts from the start of its forward or backward to the start of the
next unit's, without the waits in between.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from shardwise.diagnose.recording import (
    MemorySample,
    RankRecording,
    RecordedEvent,
    Span,
    StepTotals,
)
from shardwise.schedule.events import EventKind

__all__ = ["Bar", "BarKind", "Timeline", "Track", "by_step"]


_Timed = TypeVar("_Timed", RecordedEvent, Span, MemorySample)


class BarKind(IntEnum):
    """What a bar of the timeline stands for."""

    FORWARD = 0
    BACKWARD = 1
    WAIT_GATHER = 2  # exposed communication
    WAIT_REDUCE = 3  # exposed communication
    STEP = 4  # the optimizer, in backward
    GATHER = 5
    REDUCE = 6
    DATA = 7
    OPTIMIZER = 8
    OTHER = 9


class Track(IntEnum):
    """The tracks of a rank, from the top."""

    COMPUTE = 0
    GATHER = 1
    REDUCE = 2


class Bar(NamedTuple):
    """One interval on a track; times are seconds on the clock of rank 0."""

    track: Track
    kind: BarKind
    unit: int | None  # None outside units
    name: str  # the span's name; "" for other bars
    bytes: int
    began: float
    ended: float


_COMPUTE = {EventKind.FORWARD: BarKind.FORWARD, EventKind.BACKWARD: BarKind.BACKWARD}
_WAITS = {
    EventKind.WAIT: BarKind.WAIT_GATHER,
    EventKind.FINISH_REDUCE: BarKind.WAIT_REDUCE,
    EventKind.STEP: BarKind.STEP,
}
_LAUNCHES = {
    EventKind.GATHER: (Track.GATHER, BarKind.GATHER),
    EventKind.RESHARD_TO_SUBGROUP: (Track.GATHER, BarKind.GATHER),
    EventKind.REDUCE: (Track.REDUCE, BarKind.REDUCE),
}
_SPANS = {"data": BarKind.DATA, "optimizer": BarKind.OPTIMIZER}


class Timeline:
    """The bars of one rank, by step and in order of time."""

    def __init__(self, rank: RankRecording) -> None:
        self._events: Mapping[int, Sequence[RecordedEvent]] = by_step(rank.events)
        self._spans = by_step(rank.spans)
        self._memory = by_step(rank.memory)
        self._steps = {step.step: step for step in rank.steps}

    def totals(self, step: int) -> StepTotals:
        """The totals of a complete step."""
        return self._steps[step]

    def bars(self, step: int) -> Iterator[Bar]:
        """Return the bars of a complete step, from the events of that step alone."""
        totals = self._steps[step]
        yield from _compute_bars(self._events.get(step, ()), totals)
        for event in self._events.get(step, ()):
            for began, ended in event.spans:
                track, kind = _LAUNCHES[event.event]
                yield Bar(track, kind, event.unit, "", event.bytes, began, ended)

    def bars_around(self, step: int) -> Iterator[Bar]:
        """Return the spans (optimizer, data and others) just before, within and after a step."""
        until = self._steps[step + 1].began if step + 1 in self._steps else float("inf")
        for span in (*self._spans.get(step, ()), *self._spans.get(step + 1, ())):
            if span.ended > self._steps[step].began and span.began < until:
                yield _span_bar(span)

    def memory(self, step: int) -> Sequence[MemorySample]:
        """Return the memory samples of a step."""
        return self._memory.get(step, ())


def by_step(records: Iterable[_Timed]) -> dict[int, list[_Timed]]:
    """Group records by step."""
    steps: defaultdict[int, list[_Timed]] = defaultdict(list)
    for record in records:
        steps[record.step].append(record)
    return dict(steps)


def _compute_bars(events: Iterable[RecordedEvent], totals: StepTotals) -> Iterator[Bar]:
    kind: BarKind | None = None
    unit, since = 0, totals.began  # unit and start of the current compute bar
    for event in events:
        begins, waits = _COMPUTE.get(event.event), _WAITS.get(event.event)
        if begins is None and (waits is None or event.ended <= event.began):
            continue
        if kind is not None and event.began > since:
            yield Bar(Track.COMPUTE, kind, unit, "", 0, since, event.began)
        if waits is not None:
            yield Bar(Track.COMPUTE, waits, event.unit, "", 0, event.began, event.ended)
        if begins is not None:
            kind, unit = begins, event.unit
        since = event.ended
    if kind is not None and totals.ended > since:
        yield Bar(Track.COMPUTE, kind, unit, "", 0, since, totals.ended)


def _span_bar(span: Span) -> Bar:
    kind = _SPANS.get(span.name, BarKind.OTHER)
    return Bar(Track.COMPUTE, kind, None, span.name, 0, span.began, span.ended)
