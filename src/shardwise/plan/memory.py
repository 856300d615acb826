"""What one rank holds of parameters and gradients: between steps, and at the peak of one.

The figures are a replay of `schedule`, so they are what the engine does. Two blocks in a root::

    between steps   shards, gradient shards
    forward         + root, block 0, block 1
    backward        + root, two blocks, and for each of two reductions: its buffer and scratch
                    + gradients of the root, which wait until its own backward ends

Not in them: activations, what autograd keeps on the way, optimizer states and the model's buffers.
"""

from dataclasses import dataclass

from shardwise.plan.events import Event, EventKind
from shardwise.plan.plan import Plan
from shardwise.plan.schedule import schedule
from shardwise.plan.units import UnitPlan

__all__ = ["StepMemory", "step_memory"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of parameters and gradients on one rank."""

    between_steps_bytes: int  # shards of both; gradient shards are kept for the next step
    peak_bytes: int
    peak_event: Event  # the first after which that much is held

    @property
    def transient_bytes(self) -> int:
        """What a step takes at its peak and gives back."""
        return self.peak_bytes - self.between_steps_bytes


def step_memory(plan: Plan, *, scratch_slots: int = 0, accumulates: bool = False) -> StepMemory:
    """The memory of one training step of ``plan``, from the second step on.

    All gradients of a unit that encloses others are taken to wait for the end of its backward. So
    the peak is exact for those of layers after the last inner unit, and too high by those of layers
    before the first, such as an embedding that is not tied.

    Args:
        plan: of the model.
        scratch_slots: slots of scratch that a reduction takes beside its buffer, a fact of what
            moves the bytes: one less than the ranks of the longer mesh dimension on Gloo, none on
            NCCL.
        accumulates: gradients of earlier backwards are there to be added to.
    """
    units = {unit.label: unit for unit in plan.units}
    base = plan.shard_bytes + plan.gradient_shard_bytes
    events = schedule(plan)
    held = peak = base
    peak_event = events[0]
    for event in events:
        unit = units[event.unit]
        reduction = _reduction_bytes(unit, scratch_slots, accumulates=accumulates)
        match event.kind:
            case EventKind.GATHER:
                held += event.bytes
            case EventKind.FREE:
                held -= event.bytes
            case EventKind.BACKWARD:
                held += _waiting_bytes(unit) if unit.encloses else unit.gradient_bytes
            case EventKind.REDUCE:
                held += reduction - (0 if unit.encloses else unit.gradient_bytes)
            case EventKind.COLLECT:
                held -= reduction
        if held > peak:
            peak, peak_event = held, event
        if event.kind is EventKind.REDUCE and unit.encloses:
            held -= _waiting_bytes(unit)  # they were there until the buffer had them
    assert held == base, "a step leaves shards alone"
    return StepMemory(base, peak, peak_event)


def _reduction_bytes(unit: UnitPlan, scratch_slots: int, *, accumulates: bool) -> int:
    """The buffer of a reduction, its scratch, and a target of its own if gradients are there."""
    slots = scratch_slots + accumulates
    return unit.gradient_bytes + slots * unit.gradient_shard_bytes


def _waiting_bytes(unit: UnitPlan) -> int:
    return sum(parameter.num_bytes for parameter in unit.parameters if parameter.trainable)
