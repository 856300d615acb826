"""Converts a forecast to a recording, so that the same plots and traces can show it."""

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, groupby

from shardwise.forecast.forecast import Forecast
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
from shardwise.schedule.events import COMPUTE, GATHERS, WAITS, Event, EventKind

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
        events,
        (span,) if update else (),
        tuple(_samples(forecast, plan, passes[-1])),
        tuple(map(_totals, passes, ends)),
    )


def _samples(forecast: Forecast, plan: Plan, events: list[RecordedEvent]) -> Iterator[MemorySample]:
    """Yield the memory of the last micro-batch, the only one that the certificate covers."""
    labels = [unit.label for unit in plan.units]
    # An event has several moments if less stays at its end than is needed within it.
    by_event = groupby(forecast.memory.timeline, key=lambda moment: moment.label)
    expected = deque((label, list(moments)) for label, moments in by_event)
    held = expected[0][1]
    unit = 0
    for timed in events:
        if expected and expected[0][0] == f"{timed.event.value} {labels[timed.unit]}":
            held = expected.popleft()[1]
        else:
            held = held[-1:]
        if timed.event in COMPUTE:
            unit = timed.unit
        for moment in held:
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


def _totals(events: list[RecordedEvent], ended: float) -> StepTotals:
    changes = (Event(one.event, one.unit, one.bytes).gathered_change for one in events)
    collectives = [one for one in events if one.event in _COLLECTIVES]
    return StepTotals(
        step=events[0].step,
        began=events[0].began,
        ended=ended,
        updates=0,
        exposed_seconds=sum(one.seconds for one in events if one.event in WAITS),
        communication_seconds=sum(end - begin for one in collectives for begin, end in one.spans),
        communication_bytes=sum(one.bytes for one in collectives),
        peak_gathered_bytes=max(accumulate(changes, initial=0)),
    )
