"""The timeline of a recorded step: what each stream of a rank did, and when.

A rank has three tracks: compute (with its waits and the spans around the steps), gathers, and
reductions. A unit's compute lasts from the start of its forward or backward to the start of the
next unit's, without the waits in between.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

from shardwise.recording.format import MemorySample, RankRecording, RecordedEvent, Span, StepTotals
from shardwise.schedule.events import COMPUTE, COPIES, EventKind

__all__ = ["Bar", "BarKind", "Timeline", "Track", "by_step", "compute_spans"]

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


_COMPUTE = {
    EventKind.FORWARD: BarKind.FORWARD,
    EventKind.BACKWARD: BarKind.BACKWARD,
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
        self.header = rank.header
        self._events: Mapping[int, Sequence[RecordedEvent]] = by_step(rank.events)
        self._spans = by_step(rank.spans)
        self._memory = by_step(rank.memory)
        self._steps = {step.step: step for step in rank.steps}

    def totals(self, step: int) -> StepTotals:
        return self._steps[step]

    def bars(self, step: int) -> Iterator[Bar]:
        """Return the bars of a complete step, from the events of that step alone."""
        events = self._events.get(step, ())
        for event, began, ended in compute_spans(events, self._steps[step].ended):
            yield Bar(Track.COMPUTE, _COMPUTE[event.event], event.unit, "", 0, began, ended)
        for event in events:
            if event.event in COPIES:  # they have no track
                continue
            for began, ended in event.spans:
                track, kind = _LAUNCHES[event.event]
                yield Bar(track, kind, event.unit, "", event.bytes, began, ended)

    def bars_around(self, step: int) -> Iterator[Bar]:
        """Return the spans (optimizer, data and others) just before, within and after a step."""
        until = self._steps[step + 1].began if step + 1 in self._steps else float("inf")
        for span in (*self._spans.get(step, ()), *self._spans.get(step + 1, ())):
            if span.ended > self._steps[step].began and span.began < until:
                kind = _SPANS.get(span.name, BarKind.OTHER)
                yield Bar(Track.COMPUTE, kind, None, span.name, 0, span.began, span.ended)

    def memory(self, step: int) -> Sequence[MemorySample]:
        return self._memory.get(step, ())


def by_step(records: Iterable[_Timed]) -> dict[int, list[_Timed]]:
    steps: defaultdict[int, list[_Timed]] = defaultdict(list)
    for record in records:
        steps[record.step].append(record)
    return dict(steps)


def compute_spans(
    events: Iterable[RecordedEvent], step_ended: float
) -> Iterator[tuple[RecordedEvent, float, float]]:
    """Yield what a rank's compute stream did in a step, and from when to when.

    This is a forward or backward, until the next one begins, or a wait.
    """
    computing: RecordedEvent | None = None  # the last forward or backward that began
    since = 0.0
    for event in events:
        begins = event.event in COMPUTE
        if event.event not in _COMPUTE or (event.ended <= event.began and not begins):
            continue
        if computing is not None and event.began > since:
            yield computing, since, event.began
        if begins:
            computing = event
        else:
            yield event, event.began, event.ended
        since = event.ended
    if computing is not None and step_ended > since:
        yield computing, since, step_ended
