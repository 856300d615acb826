"""Memory of parameters and gradients on one rank, event by event.

With offload, shards and their gradients stay on the host from step to step, and reduced gradients
leave the device one unit later, unless they are stepped on the device.
"""

from dataclasses import dataclass, replace

from shardwise.features.stepped_units import MAX_STEPPED_UNITS, SteppedUnits
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.states import stepped_bytes
from shardwise.forecast.time.wires import gather_scratch, reduce_scratch
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import Event, EventKind

__all__ = ["DeviceStepReplay", "MemoryReplay", "ReplayOptions"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The training loop around the backward that is replayed.

    Args:
        accumulates: whether the step adds to gradients of earlier backwards.
        num_unreduced: how many earlier backwards of the step have reduced no gradients. Each rank
            holds the sum of their whole gradients until the end of this one, or several sums if
            they are taken in a binary tree.
        steps_in_backward: whether gradient shards live only from a unit's reduction to its step, as
            with `sw.optimizer_in_backward`.
        on_cpu: whether gradients that are reduced in place keep their memory, as on a CPU.
        adds_by_unit: whether whole gradients are kept by unit, as in FSDP2: a backward that reduces
            nothing adds those of each unit at once, and the last one frees them after each
            reduction.
    """

    accumulates: bool = False
    num_unreduced: int = 0
    steps_in_backward: bool = False
    on_cpu: bool = False
    adds_by_unit: bool = False


class MemoryReplay:
    """Counts allocated bytes event by event.

    Attributes:
        base: bytes between steps: shards, and kept gradients with their rounding errors
            (`Wire.error_feedback`).
        gathered: bytes of gathered units and of shards within a subgroup.
        reducing: bytes of gradients before their reduction and of reduce buffers.
        accumulated: bytes of whole gradients from earlier backwards of the step.
        host: bytes of shards and gradients on the host, without staging buffers.
        staging: the most bytes of staging buffers on the host.
        transient: the most bytes of memory that is allocated and freed in a step, without gradient
            shards.
        total_peak: the most bytes so far on device and host together.
        gradients: bytes of gradients after backward, on device and host.
        event_peak: the most bytes allocated during the last event.
    """

    def __init__(self, plan: Plan, options: ReplayOptions) -> None:
        self._plan = plan
        self._options = options
        # Bytes of reduced gradients that are copied to the host while the next unit is reduced, and
        # of their staging buffer there, if they are accumulated or not kept.
        self._leaving = self._staged = 0
        self._arrived: dict[int, int] = {}  # bytes of gradients on the host that are not stepped
        self._new_shards = 0  # bytes of gradient shards allocated in this step
        kept = [unit.shard_bytes + _kept_gradients(unit, options) for unit in plan.units]
        self.host = sum(unit.shard_bytes for unit in plan.units if unit.offload is not None)
        self.host += sum(_kept_gradients(u, options) for u in plan.units if u.offloads_gradients)
        copies = sum(unit.device_copy_bytes for unit in plan.units)
        owned = sum(unit.gradient_bytes for unit in plan.units if unit.holds_gradients)
        self.base = sum(kept) - self.host + copies + owned
        shards = sum(unit.shard_bytes for unit in plan.units if unit.offload is None)
        self._kept_gradients = self.base - shards - copies
        for unit in plan.units:
            if unit.options.num_ranks > 1:
                self.base += unit.feedback_bytes
        # Left by earlier backwards of the step: whole gradients, and shards within the subgroup.
        is_left = options.num_unreduced > 0
        self._carried = sum(u.kept_bytes for u in plan.units if u.two_level_gather) * is_left
        self.accumulated = self._num_sums(options.num_unreduced) * self._whole_bytes
        self.gathered, self.reducing = self._carried, 0
        # Scratch bytes by unit while its collective runs; collectives of one kind run in sequence.
        self._gathers: dict[int, int] = {}
        self._reductions: dict[int, int] = {}
        self._in_subgroup = set[int]()
        self.event_peak = self.allocated
        peak = max(self.event_peak, self.earlier_peak)
        self.transient = peak - self.base
        reduced = sum(u.gradient_shard_bytes for u in plan.units)
        self.gradients = reduced * (not options.steps_in_backward) + owned
        self.staging = 0
        self.total_peak = peak + self.host

    @property
    def earlier_peak(self) -> int:
        """Bytes on the device while an earlier backward adds its gradients to others; 0 if none."""
        num_earlier = self._options.num_unreduced - 1  # before the last one that is not reduced
        if num_earlier < 1 or self._options.adds_by_unit:
            return 0
        held = max(map(self._num_sums, range(1, num_earlier + 1))) * self._whole_bytes
        # No buffer uses memory that a reduction would keep.
        options = replace(self._options, on_cpu=False)
        gradients = [_gradient_bytes(unit, options) for unit in self._plan.units]
        waiting = sum(one.produced for one in gradients)
        late = sum(one.buffer - one.in_buffer for one in gradients)
        # The root and its first child are gathered until the last gradients exist.
        gathered = [unit.gathered_bytes for unit in self._plan.units]
        last = gathered[0] + max(gathered[1:], default=0)
        return self.base + self._carried + held + waiting + max(late, last)

    @property
    def _whole_bytes(self) -> int:
        return sum(unit.gradient_bytes for unit in self._plan.units)

    def _num_sums(self, num_backwards: int) -> int:
        """The sums of whole gradients after ``num_backwards`` that have reduced nothing.

        In a reproducible model they are the bits of the number, as in `AccumulatedGradients`.
        """
        return num_backwards.bit_count() if self._plan.leaves is not None else min(num_backwards, 1)

    @property
    def allocated(self) -> int:
        """Bytes on the device now."""
        whole = self.accumulated + self.reducing + self.encoding
        return self.base + self._new_shards + self.gathered + whole

    @property
    def encoding(self) -> int:
        """Bytes of quantized codes and of their encoding and decoding on the device now."""
        return sum(max(sizes.values(), default=0) for sizes in (self._gathers, self._reductions))

    @property
    def gradient_shards(self) -> int:
        """Bytes of gradient shards on the device now."""
        return self._kept_gradients + self._new_shards

    def apply(self, event: Event) -> None:
        unit, options = self._plan.units[event.unit], self._options
        gradients = _gradient_bytes(unit, options)
        self.event_peak = 0
        self._encode(event)
        match event.kind:
            case EventKind.RESHARD_TO_SUBGROUP | EventKind.FREE_SUBGROUP if (
                options.num_unreduced and unit.two_level_gather
            ):
                pass
            case EventKind.GATHER | EventKind.RESHARD_TO_SUBGROUP:
                self.gathered += event.bytes
            case EventKind.WAIT:
                self.gathered += unit.chunked_bytes  # both buffers, while one is copied
                self._update_peak()
                self.gathered -= unit.chunked_bytes
            case EventKind.FREE | EventKind.FREE_SUBGROUP:
                self.gathered -= event.bytes
            case EventKind.BACKWARD:
                self.reducing += gradients.produced
            case EventKind.REDUCE:
                self.reducing += gradients.buffer - gradients.in_buffer
                self.reducing += unit.chunked_gradient_bytes
                self._update_peak()  # both the buffer and the gradients that waited are allocated
                self.reducing -= unit.chunked_gradient_bytes * (not unit.holds_gradients)
                self.reducing -= gradients.produced - gradients.in_buffer
                self.reducing += _output_bytes(unit, self._options)
                self._add_shards(unit.gradient_shard_bytes - _in_place_bytes(unit, options), unit)
            case EventKind.FINISH_REDUCE:
                self.reducing -= gradients.buffer + _output_bytes(unit, self._options)
                self.reducing -= unit.chunked_gradient_bytes * unit.holds_gradients
                self._add_shards(
                    _in_place_bytes(unit, options) - _permanent_bytes(unit, options), unit
                )
                self._begin_offload(event.unit)
                if options.adds_by_unit and self.accumulated:
                    self.accumulated -= unit.gradient_bytes
            case EventKind.STEP:
                self._add_shards(-unit.gradient_shard_bytes, unit)
                self._end_offload(event.unit)
        self._update_peak()

    def _encode(self, event: Event) -> None:
        """Allocate or free the scratch memory of a quantized wire."""
        plan, index, on_cpu = self._plan, event.unit, self._options.on_cpu
        unit = plan.units[index]
        match event.kind:
            case EventKind.GATHER if index not in self._in_subgroup:
                ranks = unit.options.world_size
                self._gathers[index] = gather_scratch(unit, ranks, on_cpu=on_cpu)
            case EventKind.RESHARD_TO_SUBGROUP:
                self._in_subgroup.add(index)
                if unit.two_level_gather:
                    self._gathers[index] = gather_scratch(
                        unit, unit.options.replicas, on_cpu=on_cpu
                    )
            case EventKind.REDUCE:
                self._reductions[index] = reduce_scratch(plan, unit, on_cpu=on_cpu)
            case EventKind.WAIT | EventKind.FREE:
                self._gathers.pop(index, None)
            case EventKind.FREE_SUBGROUP:
                self._in_subgroup.discard(index)
            case EventKind.FINISH_REDUCE:
                self._reductions.pop(index, None)

    def _update_peak(self) -> None:
        allocated = self.allocated
        self.event_peak = max(self.event_peak, allocated)
        # With steps in backward, gradient shards come from the pool of transient memory.
        kept = self.base + self._new_shards * (not self._options.steps_in_backward)
        self.transient = max(self.transient, allocated - kept)
        staging = self._staged + sum(self._arrived.values())
        self.staging = max(self.staging, staging)
        self.total_peak = max(self.total_peak, allocated + self.host + staging)

    def check_end(self) -> None:
        left = self._carried + self.accumulated
        remaining = self.base + left + self._leaving + self._new_shards
        assert self.allocated == remaining, "a step frees everything but shards"

    def _begin_offload(self, index: int) -> None:
        """Copy the gradients of a unit to the host; those of the one before have arrived."""
        unit = self._plan.units[index]
        self._offload(unit.trainable_layouts if unit.offloads_gradients else ())
        if self._options.steps_in_backward and unit.offloads_gradients:
            self._arrived[index] = unit.gradient_shard_bytes

    def _end_offload(self, index: int) -> None:
        """Free the gradients of a unit that was stepped."""
        if index == next(reversed(self._arrived), index):  # its copy was the last one
            self._offload(())
        self._arrived.pop(index, None)

    def _offload(self, layouts: tuple[Layout, ...]) -> None:
        self.reducing -= self._leaving
        self._leaving = sum(one.shard_elements * one.cast.reduce_itemsize for one in layouts)
        self.reducing += self._leaving
        is_staged = self._options.accumulates and not self._options.steps_in_backward
        self._staged = is_staged * sum(one.shard_bytes for one in layouts)

    def _add_shards(self, num_bytes: int, unit: UnitPlan) -> None:
        """Allocate new gradient shards on the device, or free them."""
        is_new = self._options.steps_in_backward or not self._options.accumulates
        if is_new and not unit.offloads_gradients:
            self._new_shards += num_bytes


def _kept_gradients(unit: UnitPlan, options: ReplayOptions) -> int:
    """Return the bytes of a unit's gradients that are allocated between steps."""
    is_kept = (options.accumulates or unit.offloads_gradients) and not options.steps_in_backward
    return unit.gradient_shard_bytes if is_kept else _permanent_bytes(unit, options)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradients of a unit before their reduction, in bytes."""

    produced: int  # produced by its backward
    in_buffer: int  # part of these that is in the reduce buffer
    buffer: int  # size of the reduce buffer, unless it is permanent


def _gradient_bytes(unit: UnitPlan, options: ReplayOptions) -> _Gradients:
    if unit.holds_gradients:
        return _Gradients(0, 0, 0)
    if not unit.has_child_units:
        new = unit.gradient_bytes - _permanent_bytes(unit, options)
        return _Gradients(new, new, new)
    waiting = sum(
        extent.parameter.num_elements * layout.cast.compute_itemsize
        for layout in unit.trainable_layouts
        for extent in layout.extents
    )
    return _Gradients(waiting, 0, unit.gradient_bytes)


def _in_place_bytes(unit: UnitPlan, options: ReplayOptions) -> int:
    """Return the bytes of gradient shards that are the reduce buffer itself."""
    is_elsewhere = unit.has_child_units or unit.holds_gradients or unit.offloads_gradients
    if is_elsewhere or options.accumulates or options.steps_in_backward:
        return 0
    return sum(one.gradient_shard_bytes for one in unit.trainable_layouts if one.is_whole_sum)


def _permanent_bytes(unit: UnitPlan, options: ReplayOptions) -> int:
    """Return the part of `_in_place_bytes` that keeps its memory from step to step."""
    return _in_place_bytes(unit, options) if options.on_cpu else 0


def _output_bytes(unit: UnitPlan, options: ReplayOptions) -> int:
    """Return the bytes of reduction outputs that are not the gradients themselves."""
    return sum(
        layout.shard_elements * layout.cast.reduce_itemsize  # cast during the copy to the host
        if unit.offloads_gradients
        else layout.shard_bytes * options.accumulates
        for layout in unit.trainable_layouts
    )


class DeviceStepReplay:
    """Counts the bytes of shards and states as `features.device_step` copies them.

    Attributes:
        update_bytes: the most bytes if units are stepped after backward.
    """

    def __init__(self, plan: Plan, configuration: Configuration) -> None:
        self._sizes = [
            stepped_bytes(unit, configuration) if unit.steps_on_device else 0 for unit in plan.units
        ]
        self._on_device: SteppedUnits[int] = SteppedUnits(drop=id)
        self._steps_in_backward = configuration.step_in_backward
        sizes = [size for size in self._sizes if size] * (not self._steps_in_backward)
        windows = (sizes[i : i + MAX_STEPPED_UNITS] for i in range(len(sizes)))
        self.update_bytes = max(map(sum, windows), default=0)

    @property
    def allocated(self) -> int:
        """Bytes on the device now, in a backward that steps units."""
        return sum(self._sizes[index] for index in self._on_device)

    def apply(self, event: Event) -> None:
        """Copy or step a unit, if units are stepped in backward."""
        index = event.unit
        if not self._steps_in_backward or not self._sizes[index]:
            return
        units = self._on_device
        if event.kind is EventKind.REDUCE and units.takes_ahead(index):
            units.make_room()
            units.ahead[index] = index
        elif event.kind is EventKind.STEP:
            if units.ahead.pop(index, None) is None:
                units.make_room()
            units.leaving.append(index)

    def finish(self) -> None:
        """End the backward."""
        self._on_device.clear()
