"""What one rank holds of parameters and gradients: between steps, and at the peak of one.

The figures are a replay of `schedule`, so they are what the engine does. Two blocks in a root::

    between steps   shards
    forward         + root, block 0, block 1
    backward        + root, two blocks, and for each of two reductions: its buffer and scratch
                    + gradient shards of what was reduced
                    + gradients of the root, which wait until its own backward ends
    update          + gradient shards

With offload the first line is the host's, where gradient shards stay from step to step, and reduced
gradients leave the device one unit later.
Not in them: activations, what autograd keeps on the way, optimizer states and the model's buffers.
"""

from dataclasses import dataclass

from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import Event, EventKind, describe
from shardwise.schedule.sequencer import schedule
from shardwise.transport.api import Capabilities, Operation, RankGroup, Stage

__all__ = ["StepMemory", "step_memory"]


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of parameters and gradients on one rank; of its device, unless they say host."""

    between_steps_bytes: int  # with gradients if the step is to add to them, or they keep memory
    gradient_bytes: int  # after backward; of the device and of the host
    transient_bytes: int  # what a step takes and gives back, gradient shards aside, at its peak
    peak_bytes: int
    peak_event: str  # the first after which that much is held, such as "gather layers.0"
    host_bytes: int = 0  # shards and gradients that are offloaded
    host_peak_bytes: int = 0
    total_peak_bytes: int = 0  # of device and host together, as where the CPU computes


def step_memory(
    plan: Plan,
    *,
    transport: Capabilities | None = None,
    accumulates: bool = False,
    holds: bool = False,
    steps_in_backward: bool = False,
    on_cpu: bool = False,
) -> StepMemory:
    """The memory of one training step of ``plan``, from the second step on.

    All gradients of a unit that encloses others are taken to wait for the end of its backward. So
    the peak is exact for those of layers after the last inner unit, and too high by those of layers
    before the first, such as an embedding that is not tied.

    Args:
        plan: of the model.
        transport: what moves gradients; by default one whose reductions take no scratch.
        accumulates: gradients of earlier backwards are there to be added to.
        holds: these are whole on every rank, for they were not reduced yet.
        steps_in_backward: gradient shards live from a unit's reduction to its step, as with
            `sw.optimizer_in_backward`.
        on_cpu: it computes, so gradients that are reduced where they are keep their memory.
    """
    way = _Way(transport or Capabilities(), accumulates, holds, steps_in_backward, on_cpu)
    replay = _Replay(plan, way)
    events = schedule(plan, steps_in_backward=steps_in_backward)
    peak_event = events[0]
    for event in events:
        if replay.take(event):
            peak_event = event
    replay.check_end()
    return StepMemory(
        between_steps_bytes=replay.base,
        gradient_bytes=replay.gradients,
        transient_bytes=replay.transient,
        peak_bytes=replay.peak,
        peak_event=describe(peak_event, [unit.label for unit in plan.units]),
        host_bytes=replay.host,
        host_peak_bytes=replay.host_peak,
        total_peak_bytes=replay.total_peak,
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """How a step is made; see `step_memory`."""

    transport: Capabilities
    accumulates: bool
    holds: bool
    steps_in_backward: bool
    on_cpu: bool


class _Replay:
    """What a rank holds after each event."""

    def __init__(self, plan: Plan, way: _Way) -> None:
        self._plan = plan
        self._way = way
        self._landing = _Landing(0, 0)
        self._made = 0  # gradient shards that were not there before, and are now
        kept = [_kept_bytes(unit, way) for unit in plan.units]
        self.host = sum(k for k, unit in zip(kept, plan.units, strict=True) if unit.offload)
        near = sum(unit.device_copy_bytes for unit in plan.units)
        owned = sum(unit.gradient_bytes for unit in plan.units if unit.holds_gradients)
        self.base = sum(kept) - self.host + near + owned
        # What earlier backwards of the step left: whole gradients, and what crossed the outer axis.
        self._carried = sum(u.kept_bytes for u in plan.units if u.two_level_gather) * way.holds
        whole = sum(_gradient_bytes(unit, way).buffer for unit in plan.units) * way.holds
        self._held = self.peak = self.base + self._carried + whole
        self.transient = self._held - self.base
        shards = 0 if way.steps_in_backward else sum(u.gradient_shard_bytes for u in plan.units)
        self.gradients = shards + owned
        self.host_peak = self.host
        self.total_peak = self.peak + self.host

    def take(self, event: Event) -> bool:
        """Whether more is held than ever before."""
        unit, way = self._plan.units[event.unit], self._way
        gradients = _gradient_bytes(unit, way)
        before = self.peak
        match event.kind:
            case EventKind.RESHARD_TO_SUBGROUP | EventKind.FREE_SUBGROUP if (
                way.holds and unit.two_level_gather
            ):
                pass
            case EventKind.GATHER | EventKind.RESHARD_TO_SUBGROUP:
                self._held += event.bytes
            case EventKind.FREE | EventKind.FREE_SUBGROUP:
                self._held -= event.bytes
            case EventKind.BACKWARD:
                self._held += gradients.on_the_way - gradients.in_buffer * way.holds
            case EventKind.REDUCE:
                self._held += (gradients.buffer - gradients.in_buffer) * (not way.holds)
                self._note_peak()  # the buffer has them, and those that waited are not yet free
                self._held -= gradients.on_the_way - gradients.in_buffer
                self._held += self._beside(unit)
                self._make(unit.gradient_shard_bytes - _in_place_bytes(unit, way), unit)
            case EventKind.FINISH_REDUCE:
                self._held -= gradients.buffer + self._beside(unit)
                self._make(_in_place_bytes(unit, way) - _standing_bytes(unit, way), unit)
                self._land(_landing(unit, way))
            case EventKind.STEP:
                self._make(-unit.gradient_shard_bytes, unit)
                self._land(_Landing(0, 0))
        self._note_peak()
        return self.peak > before

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self._held)
        # Those that a step in backward frees come from where the rest comes from.
        kept = self.base + self._made * (not self._way.steps_in_backward)
        self.transient = max(self.transient, self._held - kept)
        self.host_peak = max(self.host_peak, self.host + self._landing.host)
        self.total_peak = max(self.total_peak, self._held + self.host + self._landing.host)

    def check_end(self) -> None:
        left = self.base + self._carried + self._landing.device + self._made
        assert self._held == left, "a step leaves shards alone"

    def _land(self, following: "_Landing") -> None:
        self._held += following.device - self._landing.device
        self._landing = following

    def _make(self, num_bytes: int, unit: UnitPlan) -> None:
        """Add gradient shards that were not there before and are on the device, or free them."""
        is_new = self._way.steps_in_backward or not self._way.accumulates
        if is_new and unit.offload is None:
            self._made += num_bytes
            self._held += num_bytes

    def _beside(self, unit: UnitPlan) -> int:
        return _reduction_bytes(self._plan, unit, self._way.transport, self._way.accumulates)


def _kept_bytes(unit: UnitPlan, way: _Way) -> int:
    """Between steps."""
    stays = (way.accumulates or unit.offload is not None) and not way.steps_in_backward
    gradients = unit.gradient_shard_bytes if stays else _standing_bytes(unit, way)
    return unit.shard_bytes + gradients


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The whole gradients of a unit, before they are reduced."""

    on_the_way: int  # from its backward on
    in_buffer: int  # of these, where they are reduced from
    buffer: int  # that they are reduced from, unless it is there all the time


def _gradient_bytes(unit: UnitPlan, way: _Way) -> _Gradients:
    if unit.holds_gradients:
        return _Gradients(0, 0, 0)
    if not unit.has_child_units:
        new = unit.gradient_bytes - _standing_bytes(unit, way)
        return _Gradients(new, new, new)
    waiting = sum(
        extent.parameter.num_elements * layout.cast.compute_itemsize
        for layout in unit.trainable_layouts
        for extent in layout.extents
    )
    return _Gradients(waiting, 0, unit.gradient_bytes)


def _in_place_bytes(unit: UnitPlan, way: _Way) -> int:
    """Gradient shards that are where they were reduced from, for they are the whole."""
    is_elsewhere = unit.has_child_units or unit.holds_gradients or unit.offload is not None
    if is_elsewhere or way.accumulates or way.steps_in_backward:
        return 0
    return sum(one.shard_bytes for one in unit.trainable_layouts if one.is_whole_sum)


def _standing_bytes(unit: UnitPlan, way: _Way) -> int:
    """Of these, what is kept from step to step."""
    return _in_place_bytes(unit, way) if way.on_cpu else 0


@dataclass(frozen=True, slots=True)
class _Landing:
    """Reduced gradients on their way to the host, until those of the next unit are."""

    device: int
    host: int  # where they are not the first, or not kept, beside those that are there


def _landing(unit: UnitPlan, way: _Way) -> _Landing:
    layouts = unit.trainable_layouts if unit.offload is not None else ()
    return _Landing(
        sum(layout.shard_elements * layout.cast.reduce_itemsize for layout in layouts),
        sum(layout.shard_bytes for layout in layouts)
        if way.accumulates or way.steps_in_backward
        else 0,
    )


def _reduction_bytes(plan: Plan, unit: UnitPlan, transport: Capabilities, accumulates: bool) -> int:
    """Beside its buffer: scratch, and targets that are not the gradients."""
    total = 0
    for layout in unit.trainable_layouts:
        cast = layout.cast
        is_cast = layout.casts_sums and not layout.is_offloaded
        scratch = transport.reduction_scratch(layout.num_elements, _stages(plan), is_cast=is_cast)
        total += scratch * cast.reduce_itemsize
        if layout.is_offloaded:  # cast on its way to the host
            total += layout.shard_elements * cast.reduce_itemsize
        elif accumulates:
            total += layout.shard_bytes
    return total


def _stages(plan: Plan) -> tuple[Stage, ...]:
    """How gradients are summed, as `DataParallelMesh.reduction`."""
    row, column = (RankGroup(tuple(range(size)), 0) for size in (plan.row, plan.replicas))
    in_column = Operation.REDUCE_SCATTER if plan.strategy.is_two_level else Operation.ALL_REDUCE
    stages = (Stage(Operation.REDUCE_SCATTER, row), Stage(in_column, column))
    return stages if column.size > 1 else stages[:1]
