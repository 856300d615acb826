"""Converts a forecast to a recording, so that the same plots and traces can show it."""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, groupby

from shardwise.forecast.forecast import Forecast
from shardwise.forecast.time.replay import TimedEvent
from shardwise.plan.plan import Plan
from shardwise.recording.format import (
    Header,
    MemorySample,
    RankRecording,
    RecordedEvent,
    Span,
    StepTotals,
    UnitFigures,
)
from shardwise.schedule.events import COMPUTE, GATHERS, WAITS, EventKind, describe

__all__ = ["recording_of"]

_COLLECTIVES = (*GATHERS, EventKind.REDUCE)


def recording_of(forecast: Forecast, plan: Plan) -> RankRecording:
    """Return what a rank would record of an update: one step per replayed micro-batch."""
    configuration, step = forecast.configuration, forecast.step
    events = step.replayed.events[0]
    passes = [list(group) for _, group in groupby(events, key=lambda one: one.step)]
    ends = [one[0].began for one in passes[1:]] + [step.replayed.seconds]
    header = Header(
        rank=0,
        world_size=1,
        strategy=configuration.strategy,
        prefetch=configuration.prefetch,
        replicas=configuration.replicas,
        device=forecast.cluster.accelerator.name,
        clock_offset=0.0,
        units=tuple(UnitFigures.of(unit, unit.shard_bytes) for unit in plan.units),
        info={},
    )
    update = sum(step.breakdown.get(name, 0.0) for name in ("optimizer", "owners"))
    span = Span(len(passes), "optimizer", ends[-1], ends[-1] + update)
    return RankRecording(
        header,
        tuple(map(_recorded, events)),
        (span,) if update else (),
        tuple(_samples(forecast, plan, passes[-1])),
        tuple(map(_totals, passes, ends)),
    )


def _recorded(timed: TimedEvent) -> RecordedEvent:
    # The schedule also has collectives that move nothing.
    spans = (timed.span,) if timed.span and timed.span[1] > timed.span[0] else ()
    return RecordedEvent(
        timed.step,
        timed.event.kind,
        timed.event.unit,
        timed.event.bytes,
        timed.began,
        timed.ended,
        spans,
    )


def _samples(forecast: Forecast, plan: Plan, events: list[TimedEvent]) -> Iterator[MemorySample]:
    """Yield the memory of the last micro-batch, the only one that the certificate covers."""
    labels = [unit.label for unit in plan.units]
    moments = deque(forecast.memory.timeline)
    moment = moments[0]
    unit = 0
    for timed in events:
        if moments and moments[0].label == describe(timed.event, labels):
            moment = moments.popleft()
        if timed.event.kind in COMPUTE:
            unit = timed.event.unit
        yield MemorySample(
            shards=moment.parameters,
            gathered=moment.gathered,
            gradients=moment.gradients + moment.communication,
            optimizer=moment.optimizer,
            activations=moment.activations,
            buffers=moment.buffers + moment.temporaries,
            step=timed.step,
            at=timed.ended,
            unit=unit,
        )


def _totals(events: list[TimedEvent], ended: float) -> StepTotals:
    changes = (one.event.gathered_change for one in events)
    collectives = [one for one in events if one.event.kind in _COLLECTIVES and one.span]
    return StepTotals(
        step=events[0].step,
        began=events[0].began,
        ended=ended,
        updates=0,
        exposed_seconds=sum(e.ended - e.began for e in events if e.event.kind in WAITS),
        communication_seconds=sum(e.span[1] - e.span[0] for e in collectives if e.span),
        communication_bytes=sum(one.event.bytes for one in collectives),
        peak_gathered_bytes=max(accumulate(changes, initial=0)),
    )
