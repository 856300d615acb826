"""One typical update of a recording: compute time by rank, and the time of each collective."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise, repeat
from statistics import median
from typing import Any

from shardwise.forecast.time.replay import Costs, Part, Program, Replayed, replay
from shardwise.page.timeline import by_step
from shardwise.recording.format import (
    RankRecording,
    RecordedEvent,
    RecordingError,
    StepTotals,
    UnitFigures,
)
from shardwise.schedule.events import COMPUTE, COPIES, WAITS, EventKind

__all__ = ["LinearCost", "Measured", "measure", "transfer_seconds"]

_LARGE = 1 << 20  # bytes from which a collective's time exceeds its latency
_Key = tuple[EventKind, int]


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Time of a collective as a function of its size: seconds = latency + bytes * slope."""

    latency: float
    slope: float

    def at(self, num_bytes: float) -> float:
        return self.latency + num_bytes * self.slope


@dataclass(frozen=True)
class Measured:
    """A typical update of a recording, which can be replayed with changes."""

    units: tuple[UnitFigures, ...]
    prefetch: int
    programs: tuple[Program, ...]  # by rank
    transfers: Mapping[_Key, float]  # seconds from the last rank's launch
    launches: Mapping[_Key, float]  # seconds on the compute stream
    unreduced: frozenset[tuple[int, int]]  # (pass, unit not reduced in it)
    update_seconds: float  # as recorded

    @property
    def num_passes(self) -> int:
        return len(self.programs[0].passes)

    def replayed(self, *, holds_gradients: bool = False) -> Replayed:
        """Replay the update according to the schedule."""
        costs = Costs(
            transfer=lambda kind, unit: self.transfers.get((kind, unit), 0.0),
            launch=lambda kind, unit: self.launches.get((kind, unit), 0.0),
        )
        return replay(
            self.units,
            self.programs,
            costs,
            prefetch=self.prefetch,
            holds_gradients=holds_gradients,
            unreduced=self.unreduced,
        )

    def bytes_of(self, key: _Key) -> int:
        kind, unit = key
        figures = self.units[unit]
        return figures.gradient_bytes if kind is EventKind.REDUCE else figures.gathered_bytes

    def fit(self, kind: EventKind, *, without: int | None = None) -> LinearCost:
        """Fit the time of collectives to their size; a few slow outliers do not affect the fit."""
        points = [
            (self.bytes_of(key), seconds)
            for key, seconds in self.transfers.items()
            if key[0] is kind and key[1] != without and self.bytes_of(key)
        ]
        return _fit_line(points)

    def with_compute(self, change: Callable[[int, float], float]) -> "Measured":
        """Replace the seconds of every part by ``change(rank, seconds)``."""
        return self.with_passes(
            lambda rank, parts: [replace(p, seconds=change(rank, p.seconds)) for p in parts]
        )

    def with_passes(
        self, change: Callable[[int, Sequence[Part]], Iterable[Part]], **changes: Any
    ) -> "Measured":
        """Replace every pass by ``change(rank, pass)``, and set the fields ``changes``."""
        programs = tuple(
            replace(program, passes=tuple(tuple(change(rank, parts)) for parts in program.passes))
            for rank, program in enumerate(self.programs)
        )
        return replace(self, programs=programs, **changes)

    def compute_seconds(self, rank: int) -> float:
        return sum(part.seconds for parts in self.programs[rank].passes for part in parts)


def measure(ranks: Sequence[RankRecording]) -> Measured:
    """Take medians over the recorded updates that have the most frequent form."""
    events = [by_step(rank.events) for rank in ranks]
    updates = _common_updates(ranks, events[0])
    programs = tuple(map(_program, ranks, events, repeat(updates)))
    transfers = [
        transfer_seconds([_events_of(update, own) for own in events]) for update in updates
    ]
    launches: defaultdict[_Key, list[float]] = defaultdict(list)
    for own in events:
        for update in updates:
            for event in _events_of(update, own):
                if event.event not in (*COMPUTE, *WAITS):
                    launches[event.event, event.unit].append(event.seconds)
    header = ranks[0].header
    return Measured(
        units=header.units,
        prefetch=header.prefetch,
        programs=programs,
        transfers=_medians(transfers),
        launches={key: median(found) for key, found in launches.items()},
        unreduced=frozenset(_unreduced(header.units, updates[0], events[0])),
        update_seconds=median(
            end - update[0].began for update, end in _ends(ranks[0].steps, updates)
        ),
    )


def _fit_line(points: Sequence[tuple[int, float]]) -> LinearCost:
    """Fit a line with the Theil-Sen estimator: the median of the slopes between points."""
    slopes = [
        (after[1] - before[1]) / (after[0] - before[0])
        for before, after in combinations(sorted(points), 2)
        if after[0] > before[0]
    ]
    if not slopes:  # all points have the same size
        size = points[0][0] if points else 1
        seconds = median(seconds for _, seconds in points) if points else 0.0
        latency = 0.0 if size >= _LARGE else seconds
        return LinearCost(latency, (seconds - latency) / size)
    slope = max(0.0, median(slopes))
    return LinearCost(max(0.0, median(seconds - slope * size for size, seconds in points)), slope)


# -- updates: the passes between two changes of the parameters -----------------------------------

_Update = tuple[StepTotals, ...]  # the steps of rank 0
_Events = Mapping[int, Sequence[RecordedEvent]]  # the events of a rank, by step


def _common_updates(ranks: Sequence[RankRecording], events: _Events) -> list[_Update]:
    """Return the updates of the most frequent form among those recorded in full on every rank."""
    detailed = set.intersection(*(set(rank.detailed_steps) for rank in ranks))
    by_update: defaultdict[int, list[StepTotals]] = defaultdict(list)
    for step in ranks[0].steps:
        by_update[step.updates].append(step)
    last = max(by_update, default=0)
    complete = {
        number: tuple(steps)
        for number, steps in by_update.items()
        if all(step.step in detailed for step in steps) and (number < last or len(by_update) == 1)
    }
    if not complete:
        raise RecordingError(
            "no update was recorded with all its events: record more steps (an update is the "
            "forward and backward of each micro-batch, and ends when the next forward begins)"
        )
    forms = {update: _form(update, events) for update in complete.values()}
    form, _ = Counter(forms.values()).most_common(1)[0]
    return [update for update, own in forms.items() if own == form]


def _form(update: _Update, events: _Events) -> tuple[tuple[_Key, ...], ...]:
    return tuple(tuple((event.event, event.unit) for event in events[step.step]) for step in update)


def _events_of(update: _Update, events: _Events) -> Iterator[RecordedEvent]:
    return chain.from_iterable(events[step.step] for step in update)


def _ends(
    steps: Sequence[StepTotals], updates: Iterable[_Update]
) -> Iterator[tuple[_Update, float]]:
    """Pair each update with the time at which the next one began."""
    following = {before.step: after.began for before, after in pairwise(steps)}
    for update in updates:
        yield update, following.get(update[-1].step, update[-1].ended)


def _program(rank: RankRecording, events: _Events, updates: Sequence[_Update]) -> Program:
    own = {step.step: step for step in rank.steps}
    by_update = [
        [list(_parts(events[step.step], own[step.step])) for step in update] for update in updates
    ]
    passes = tuple(
        tuple(
            replace(parts[0], seconds=median(part.seconds for part in parts))
            for parts in zip(*same_pass, strict=True)
        )
        for same_pass in zip(*by_update, strict=True)
    )
    outside = []
    for update, end in _ends(rank.steps, [tuple(own[s.step] for s in u) for u in updates]):
        outside.append(end - update[0].began - sum(step.seconds for step in update))
    return Program(passes, max(0.0, median(outside)))


def _parts(events: Iterable[RecordedEvent], step: StepTotals) -> Iterator[Part]:
    """Attribute the time between the events of a step to the part that began last."""
    part: Part | None = None
    now = math.nan
    for event in events:
        if part is not None:
            part = replace(part, seconds=part.seconds + max(0.0, event.began - now))
        now = event.ended
        if event.event in COMPUTE:
            if part is not None:
                yield part
            part = Part(event.event, event.unit, 0.0)
    if part is not None:
        yield replace(part, seconds=part.seconds + max(0.0, step.ended - now))


def _unreduced(
    units: Sequence[UnitFigures], update: _Update, events: _Events
) -> Iterator[tuple[int, int]]:
    for number, step in enumerate(update):
        reduced = {one.unit for one in events[step.step] if one.event is EventKind.REDUCE}
        for unit, figures in enumerate(units):
            if figures.gradient_bytes and unit not in reduced:
                yield number, unit


def transfer_seconds(ranks: Sequence[Iterable[RecordedEvent]]) -> dict[_Key, float]:
    """Return how long each collective took from the last rank's launch, as medians.

    The events of all ranks have the same order.
    """
    launched = [
        [event for event in events if event.spans and event.event not in COPIES] for events in ranks
    ]
    durations: defaultdict[_Key, list[float]] = defaultdict(list)
    for collective in zip(*launched, strict=True):
        seconds = 0.0
        for spans in zip(*(event.spans for event in collective), strict=True):
            began, ended = max(span[0] for span in spans), max(span[1] for span in spans)
            seconds += max(0.0, ended - began)
        durations[collective[0].event, collective[0].unit].append(seconds)
    return {key: median(seconds) for key, seconds in durations.items()}


def _medians(updates: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    return {key: median(own[key] for own in updates if key in own) for key in updates[0]}
