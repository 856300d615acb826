"""What one rank holds of parameters and gradients: between steps, and at the peak of one.

The figures are a replay of `schedule`, so they are what the engine does. Two blocks in a root::

    between steps   shards, gradient shards
    forward         + root, block 0, block 1
    backward        + root, two blocks, and for each of two reductions: its buffer and scratch
                    + gradients of the root, which wait until its own backward ends

With offload the first line is the host's, and reduced gradients leave the device one unit later.
Not in them: activations, what autograd keeps on the way, optimizer states and the model's buffers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.events import Event, EventKind
from shardwise.plan.plan import Plan
from shardwise.plan.schedule import schedule
from shardwise.plan.units import UnitPlan

__all__ = ["StepMemory", "is_cut", "scratch_elements", "step_memory"]

_PAIR = 2
_WHOLE_ELEMENTS = 1 << 14  # an all-reduce of fewer is one exchange of all


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of parameters and gradients on one rank; of its device, unless they say host."""

    between_steps_bytes: int  # shards of both; gradient shards are kept for the next step
    peak_bytes: int
    peak_event: Event  # the first after which that much is held
    host_bytes: int = 0  # shards and gradients that are offloaded
    host_peak_bytes: int = 0
    total_peak_bytes: int = 0  # of device and host together, as where the CPU computes

    @property
    def transient_bytes(self) -> int:
        """What a step takes at its peak and gives back."""
        return self.peak_bytes - self.between_steps_bytes


def step_memory(
    plan: Plan, *, on_wire: bool = False, accumulates: bool = False, holds: bool = False
) -> StepMemory:
    """The memory of one training step of ``plan``, from the second step on.

    All gradients of a unit that encloses others are taken to wait for the end of its backward. So
    the peak is exact for those of layers after the last inner unit, and too high by those of layers
    before the first, such as an embedding that is not tied.

    Args:
        plan: of the model.
        on_wire: ranks exchange what they reduce point to point, as on Gloo, which takes scratch.
        accumulates: gradients of earlier backwards are there to be added to.
        holds: these are whole on every rank, for they were not reduced yet.
    """
    units = {unit.label: unit for unit in plan.units}
    held_whole = sum(unit.gradient_bytes for unit in plan.units if unit.holds_gradients)
    host = sum(u.shard_bytes + u.gradient_shard_bytes for u in plan.units if u.offload is not None)
    near = sum(unit.near_bytes for unit in plan.units)
    base = plan.shard_bytes + plan.gradient_shard_bytes - host + near + held_whole
    events = [event for event in schedule(plan) if not (holds and _outlives(event, units))]
    # What earlier backwards of the step left: whole gradients, and what came over the outer axis.
    whole = sum(_gradient_bytes(unit).on_the_way for unit in plan.units) * holds
    kept = sum(unit.kept_bytes for unit in plan.units if unit.subgroup_first) * holds
    held = peak = base + whole + kept
    peak_event = events[0]
    landing = _Landing(0, 0)
    host_peak = host
    total_peak = peak + host
    for event in events:
        unit = units[event.unit]
        before, beside = _gradient_bytes(unit), _reduction_bytes(plan, unit, on_wire, accumulates)
        match event.kind:
            case EventKind.GATHER | EventKind.KEEP:
                held += event.bytes
            case EventKind.FREE | EventKind.DROP:
                held -= event.bytes
            case EventKind.BACKWARD:
                held += before.on_the_way * (not holds)
            case EventKind.REDUCE:
                held += before.buffer + beside - before.in_buffer
            case EventKind.COLLECT:
                held += -landing.device + _landing(unit, accumulates).device
                held -= before.buffer + beside
                landing = _landing(unit, accumulates)
        host_peak = max(host_peak, host + landing.host)
        total_peak = max(total_peak, held + host + landing.host)
        if held > peak:
            peak, peak_event = held, event
        if event.kind is EventKind.REDUCE:
            held -= before.on_the_way - before.in_buffer  # there until the buffer had them
    assert held == base + kept + landing.device, "a step leaves shards alone"
    return StepMemory(base, peak, peak_event, host, host_peak, total_peak)


def _outlives(event: Event, units: Mapping[str, UnitPlan]) -> bool:
    """Whether it is about what came over the outer axis, once for all backwards of a step."""
    return event.kind in (EventKind.KEEP, EventKind.DROP) and units[event.unit].subgroup_first


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The whole gradients of a unit, before they are reduced."""

    on_the_way: int  # from its backward on
    in_buffer: int  # of these, where they are reduced from
    buffer: int  # that they are reduced from, unless it is there all the time


def _gradient_bytes(unit: UnitPlan) -> _Gradients:
    if unit.holds_gradients:
        return _Gradients(0, 0, 0)
    if not unit.encloses:
        return _Gradients(*(unit.gradient_bytes,) * 3)
    waiting = sum(
        slot.parameter.num_elements * layout.cast.compute_itemsize
        for layout in unit.trainable_layouts
        for slot in layout.slots
    )
    return _Gradients(waiting, 0, unit.gradient_bytes)


@dataclass(frozen=True, slots=True)
class _Landing:
    """Reduced gradients on their way to the host, until those of the next unit are."""

    device: int
    host: int  # where they are not the first, beside those that they are added to


def _landing(unit: UnitPlan, accumulates: bool) -> _Landing:
    layouts = unit.trainable_layouts if unit.offload is not None else ()
    return _Landing(
        sum(layout.shard_elements * layout.cast.reduce_itemsize for layout in layouts),
        sum(layout.shard_bytes for layout in layouts) if accumulates else 0,
    )


def _reduction_bytes(plan: Plan, unit: UnitPlan, on_wire: bool, accumulates: bool) -> int:
    """Beside its buffer: scratch, and targets that are not the gradients."""
    total = 0
    for layout in unit.trainable_layouts:
        elements = scratch_elements(layout.num_elements, plan.row, plan.replicas) if on_wire else 0
        if accumulates or layout.is_offloaded or layout.cast.reduce_dtype != layout.dtype:
            elements += layout.shard_elements
        if plan.strategy.is_two_level and plan.replicas > 1:
            elements += layout.num_elements // plan.row
        total += elements * layout.cast.reduce_itemsize
    return total


def scratch_elements(flat_elements: int, row: int, column: int) -> int:
    """What the reduction of a flat buffer takes on a wire, by row and then by column."""
    slot = flat_elements // row
    by_column = min(column - 1, 1) if is_cut(slot, column) else column - 1
    return max(row - 1, by_column) * slot


def is_cut(num_elements: int, num_ranks: int) -> bool:
    """Whether an all-reduce is worth two exchanges, of parts; with two ranks nothing is saved."""
    return num_ranks > _PAIR and num_elements >= max(_WHOLE_ELEMENTS, num_ranks**2)
