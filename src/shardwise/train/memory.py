"""Bytes of a training run on one rank, and what one process alone would need."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from shardwise.plan.events import Event, EventKind
from shardwise.plan.plan import Plan
from shardwise.plan.schedule import schedule

__all__ = ["Footprint", "foresee_gathered", "one_process", "one_rank"]

ADAMW_STATES = 2  # the running means of the gradient and of its square


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that a step needs, activations aside (sharding does not touch those)."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int  # whole units, at their peak
    reducing: int  # whole units' gradients on their way to the shards, at their peak

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.reducing


def one_process(plan: Plan) -> Footprint:
    """Everything whole, nothing to gather."""
    return Footprint(
        parameters=plan.parameter_bytes,
        gradients=plan.gradient_bytes,
        optimizer=ADAMW_STATES * plan.gradient_bytes,
        gathered=0,
        reducing=0,
    )


def one_rank(plan: Plan, *, gathered: int) -> Footprint:
    """The shards of one rank, and ``gathered`` bytes of whole units."""
    return Footprint(
        parameters=plan.shard_bytes,
        gradients=plan.gradient_shard_bytes,
        optimizer=ADAMW_STATES * plan.gradient_shard_bytes,
        gathered=gathered,
        reducing=_peak(_reduced_changes(plan, schedule(plan))),
    )


def foresee_gathered(plan: Plan) -> int:
    """The most bytes of whole units at once in a step that runs the units in module order."""
    return _peak(_gathered_changes(schedule(plan)))


def _gathered_changes(events: Iterable[Event]) -> Iterator[int]:
    for event in events:
        if event.kind in (EventKind.GATHER, EventKind.KEEP):
            yield event.bytes
        elif event.kind in (EventKind.FREE, EventKind.DROP):
            yield -event.bytes


def _reduced_changes(plan: Plan, events: Iterable[Event]) -> Iterator[int]:
    """A unit's whole gradients live from its backward until the reduced ones are handed over."""
    whole = {unit.label: unit.gradient_bytes for unit in plan.units}
    for event in events:
        if event.kind is EventKind.BACKWARD:
            yield whole[event.unit]
        elif event.kind is EventKind.COLLECT:
            yield -whole[event.unit]


def _peak(changes: Iterable[int]) -> int:
    return max(accumulate(changes, initial=0))
