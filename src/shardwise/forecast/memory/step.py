"""The memory of one rank in a training step, by category and at every event.

The trainer, `shardwise plan` and ``sw.fit`` read this model. For two blocks in a root, a step has::

    between steps   shards, optimizer states
    forward         + root, block 0, block 1, and activations
    backward        + root, two blocks, and for each of two reductions: its buffer and output
                    + gradient shards of the units reduced so far
                    + gradients of the root, which wait until its own backward ends
    update          + gradient shards, and temporaries of the optimizer

Bytes of parameters and gradients follow from the plan and the schedule that the engine runs,
activations from a trace of the model, and optimizer states from the kind of optimizer. Nothing is
fitted. Memory outside of tensors is stated separately: what the allocator reserves beyond them, and
what the device's libraries take.

Some figures are upper bounds: a unit's gradients are counted from the start of its backward, and
those of a unit with child units from the end of its first segment in backward to the end of its
backward.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import accumulate
from math import prod

from shardwise.errors import PlanError
from shardwise.features.fused_wgrad import takes_slot
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.memory.buffers import DeviceStepReplay, MemoryReplay, ReplayOptions
from shardwise.forecast.memory.update import update_bytes
from shardwise.forecast.states import enclosing_units, state_bytes, trained_layouts
from shardwise.forecast.time.replay import Part, batches, schedule
from shardwise.forecast.work import Kind, Segment, Workload
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import COMPUTE, Event, EventKind, describe

__all__ = ["CATEGORIES", "Certificate", "Moment", "memory_certificate"]

_BELOW, _ABOVE = 0.10, 0.05  # of the peak of tensors, and of all bytes
_LABEL_BYTES = 8  # tokens and labels are int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The bytes of a rank's device at one moment of a step."""

    label: str  # such as "gather layers.0", or "update"
    parameters: int = 0  # shards
    gathered: int = 0  # gathered units
    gradients: int = 0  # gradient shards
    communication: int = 0  # gradients before their reduction, and buffers of collectives
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0  # temporaries of the update
    buffers: int = 0  # the model's buffers and the batch

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return sum(getattr(self, name) for name in CATEGORIES)

    def by_category(self) -> dict[str, int]:
        """Bytes by category, in the order of `CATEGORIES`."""
        return {name: getattr(self, name) for name in CATEGORIES}


CATEGORIES = tuple(field.name for field in fields(Moment) if field.name != "label")


@dataclass(frozen=True)
class Certificate:
    """The memory of one rank in the second or a later step."""

    timeline: tuple[Moment, ...]
    offloaded: Moment = Moment(label="host")  # peak on the host, with staging buffers
    reserve_bytes: int = 0  # reserved by the device's allocator beyond the allocated peak
    overhead_bytes: int = 0  # driver context, libraries and communicators
    # Shards, and gradients if the step adds to those of earlier steps or they keep their memory;
    # also the rounding errors that a quantized wire keeps. Without optimizer states.
    between_steps_bytes: int = 0
    gradient_bytes: int = 0  # after backward, on device and host
    # Peak of parameters and gradients that are allocated and freed in a step, without gradient
    # shards.
    transient_bytes: int = 0
    total_peak_bytes: int = 0  # of parameters and gradients on device and host together
    # While the model sleeps (`sw.sleep`): of tensors on the device, and copied to the host.
    asleep_bytes: int = 0
    asleep_host_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Peak bytes on the host."""
        return self.offloaded.total

    @property
    def range_bytes(self) -> tuple[int, int]:
        """The range of bytes that the device must hold, of which `device_bytes` is the likely one.

        An allocator that runs out of memory frees its reserve, so the lower end has none.
        """
        low = round((1 - _BELOW) * self.peak_bytes) + self.overhead_bytes
        return low, round((1 + _ABOVE) * self.device_bytes)

    @property
    def uses(self) -> dict[str, int]:
        """Bytes on device and host together by use, and the part on the host, as "host"."""
        first, host = self.timeline[0], self.offloaded
        return {
            "parameters": first.parameters + host.parameters,
            "gradients": self.gradient_bytes,
            "optimizer": first.optimizer + host.optimizer,
            "transient": self.transient_bytes,
            "host": host.total - host.activations,
        }

    @cached_property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated in tensors at the peak."""
        return self.peak.total

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved by the allocator at the peak."""
        return self.peak_bytes + self.reserve_bytes

    @property
    def device_bytes(self) -> int:
        """All bytes that the device must hold."""
        return self.reserved_bytes + self.overhead_bytes


def memory_certificate(
    plan: Plan,
    workload: Workload | None,
    configuration: Configuration,
    *,
    stage: int = 0,
    buffer_bytes: int = 0,
    on_cpu: bool = False,
) -> Certificate:
    """Predict the memory of a training step on one rank.

    Args:
        plan: the plan of one tensor-parallel rank's part of a pipeline stage.
        workload: one micro-batch on that rank, with the checkpointing of the configuration; None
            leaves out activations and the batch, and assumes that units run in module order.
        configuration: how the model is trained.
        stage: pipeline stage; the first one keeps the most micro-batches.
        buffer_bytes: bytes of the model's buffers.
        on_cpu: whether ranks compute on the CPU, which has no caching allocator.

    Raises:
        PlanError: ``reproducible`` is not the number of micro-batches in a step.
    """
    leaves = configuration.accumulation * configuration.data_parallel
    if configuration.reproducible not in (0, leaves):
        raise PlanError(
            f"reproducible={configuration.reproducible}: expected the number of micro-batches in a "
            f"step over all ranks, accumulation x shard_size x replicas = {leaves}"
        )
    replay = _StepReplay(plan, workload, configuration, stage, buffer_bytes, on_cpu)
    timeline = tuple(replay.run())
    reserve = 0
    if not on_cpu and workload is not None:
        loaded = _loaded_bytes(plan) if configuration.stack == "fsdp1" else 0
        reserve = _stream_bytes(timeline, loaded) + _split_bytes(plan, workload, timeline)
    memory = replay.memory
    return Certificate(
        timeline=timeline,
        offloaded=replay.offloaded,
        reserve_bytes=reserve,
        overhead_bytes=0 if on_cpu else _overhead_bytes(configuration),
        between_steps_bytes=memory.base,
        gradient_bytes=memory.gradients,
        transient_bytes=memory.transient,
        total_peak_bytes=memory.total_peak,
        asleep_bytes=buffer_bytes,
        asleep_host_bytes=replay.value_bytes,
    )


class _StepReplay:
    """Replays the last micro-batch of an update, when all earlier gradients are held."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload | None,
        configuration: Configuration,
        stage: int,
        buffer_bytes: int,
        on_cpu: bool,
    ) -> None:
        self._plan, self._workload, self._configuration = plan, workload, configuration
        self._on_cpu = on_cpu
        self._labels = [unit.label for unit in plan.units]
        accumulates = configuration.accumulation > 1
        holds_wholes = configuration.accumulate == "whole" or configuration.reproducible > 0
        holds = accumulates and (configuration.pipeline > 1 or holds_wholes)
        num_unreduced = holds * (configuration.accumulation - 1)
        self.memory = MemoryReplay(
            plan,
            ReplayOptions(
                accumulates and not holds,
                num_unreduced,
                configuration.step_in_backward,
                on_cpu,
                # `accumulate_unsharded_grad_if_needed` in torch's _fsdp_param_group.py
                adds_by_unit=configuration.stack == "fsdp2",
            ),
        )
        self._device_steps = DeviceStepReplay(plan, configuration)
        self._optimizer = state_bytes(plan, configuration, offloaded=False)
        self._offloaded_states = state_bytes(plan, configuration, offloaded=True)
        if configuration.outer is not None:
            # Shared parameters, the outer optimizer's momentum, and rounding errors.
            copies = 2 + configuration.outer.is_quantized
            self._optimizer += copies * _trained_bytes(plan, offloaded=False)
            self._offloaded_states += copies * _trained_bytes(plan, offloaded=True)
        self._parameters = self.memory.base - self.memory.gradient_shards
        self._waiting_activations = 0
        self._pass: _Activations | None = None
        if workload is not None:
            self._pass = _Activations(plan, workload, configuration, adds_rows=on_cpu and not holds)
            waiting = self._pass.device_bytes * self._waiting_passes(stage)
            self._waiting_activations = round(waiting)
            buffer_bytes += 2 * _LABEL_BYTES * workload.tokens
        self._kept = partial(
            Moment, parameters=self._parameters, optimizer=self._optimizer, buffers=buffer_bytes
        )
        # fsdp2 copies an all-gather's output to the parameters, and keeps the output until the next
        # all-gather ends (`AllGatherState` in torch's _fully_shard/_fsdp_param_group.py).
        gathered = (unit.gathered_bytes for unit in plan.units if unit.reshard)
        self._copies = max(gathered, default=0) if configuration.stack == "fsdp2" else 0
        self._activations = 0
        # Bytes of unreduced gradients that the trace counts as activations: those of tied
        # parameters until its end, and those of embeddings in its last segment.
        self._traced_gradients = 0
        self._enclosing = enclosing_units(plan)
        self._embedding_gradients = Counter(
            size
            for op in (workload.segments[-1].operations if workload is not None else ())
            if op.name == "embedding_dense_backward"
            for _, size in op.writes
        )

    @property
    def value_bytes(self) -> int:
        """Shards and optimizer states on the device."""
        return self._parameters + self._optimizer

    @property
    def offloaded(self) -> Moment:
        """Peak bytes on the host."""
        units = (unit for unit in self._plan.units if unit.offload is not None)
        shards = sum(unit.shard_bytes for unit in units)
        return Moment(
            label="host",
            parameters=shards,
            gradients=self.memory.host - shards,
            communication=self.memory.staging,
            optimizer=self._offloaded_states,
            activations=0 if self._pass is None else self._pass.host_bytes,
        )

    def _waiting_passes(self, stage: int) -> float:
        """Return the number of micro-batches that wait while the backward of another runs (1F1B).

        With several chunks, a stage runs as many chunk forwards before its first backward as in
        arXiv 2104.04473, so the result may be fractional.
        """
        stages, count = self._configuration.pipeline, self._configuration.accumulation
        chunks = self._configuration.chunks
        if chunks == 1:
            return min(stages - stage, count) - 1
        if count % stages:
            raise PlanError(
                f"chunks={chunks}: expected accumulation to be a multiple of pipeline={stages}, "
                f"got {count}"
            )
        begun = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        return min(begun / chunks, count) - 1

    def run(self) -> Iterator[Moment]:
        """Yield the moments of the update."""
        if self._workload is None or self._pass is None:  # a backward without activations
            steps_in_backward = self._configuration.step_in_backward
            for event in schedule(self._plan, steps_in_backward=steps_in_backward):
                self._apply(event)
                yield self._moment(describe(event, self._labels), 0)
        else:
            yield from self._run_pass(self._workload, self._pass)
        memory = self.memory
        memory.check_end()
        self._device_steps.finish()
        if memory.earlier_peak:  # of a micro-batch whose gradients are added to those before
            yield self._kept(
                label="end of an earlier backward",
                gradients=memory.gradient_shards,
                communication=memory.earlier_peak - memory.base,
                activations=self._waiting_activations,
            )
        yield self._kept(
            label="update",
            gathered=memory.gathered,
            gradients=memory.gradient_shards,
            communication=memory.accumulated + memory.reducing + memory.encoding,
            optimizer=self._optimizer + self._device_steps.update_bytes,
            temporaries=update_bytes(self._plan, self._configuration, on_cpu=self._on_cpu),
        )

    def _run_pass(self, workload: Workload, activations: "_Activations") -> Iterator[Moment]:
        """Yield the moments of a forward and backward."""
        segments, plan = workload.segments, self._plan
        parts = [Part(one.kind, one.unit, 0.0) for one in segments]
        for _, index, events in batches(
            plan.units,
            [parts],
            prefetch=plan.prefetch,
            steps_in_backward=self._configuration.step_in_backward,
        ):
            late = 0  # bytes of gradients that exist only at the end of the segment
            for event in events:
                before = self.memory.reducing - self._traced_gradients
                self._apply(event)
                if event.kind not in COMPUTE:
                    yield self._moment(describe(event, self._labels), self._activations)
                elif plan.units[event.unit].has_child_units:
                    late = self.memory.reducing - self._traced_gradients - before
            if index >= 0:
                peak, self._activations = activations.bytes_of(index)
                label = f"{segments[index].kind.value} {self._labels[segments[index].unit]}"
                yield self._moment(label, peak, late)
                if late:
                    yield self._moment(label, self._activations)
                if index == len(segments) - 1:
                    self._traced_gradients = 0

    def _apply(self, event: Event) -> None:
        self.memory.apply(event)
        self._device_steps.apply(event)
        unit, is_traced = self._plan.units[event.unit], self._workload is not None
        if is_traced and event.kind is EventKind.BACKWARD and unit.has_child_units:
            sizes = [
                (len(one.parameter.names), one.parameter.num_elements * lay.cast.compute_itemsize)
                for lay in unit.trainable_layouts
                for one in lay.extents
            ]
            once = Counter(size for uses, size in sizes if uses == 1)
            self._traced_gradients += sum(size for uses, size in sizes if uses > 1)
            if event.unit in self._enclosing:
                self._traced_gradients += sum((once & self._embedding_gradients).elements())

    def _moment(self, label: str, activations: int, late: int = 0) -> Moment:
        memory = self.memory
        within = max(0, memory.event_peak - memory.allocated)  # peak within the last event
        gradients = memory.reducing - self._traced_gradients - late
        return self._kept(
            label=label,
            gathered=memory.gathered + self._copies * bool(memory.gathered),
            gradients=memory.gradient_shards,
            communication=memory.accumulated + gradients + memory.encoding + within,
            optimizer=self._optimizer + self._device_steps.allocated,
            activations=activations + self._waiting_activations,
        )


class _Activations:
    """Activations of a pass on the device: those of the trace that are not fused or offloaded.

    With offload, the activations that a forward segment leaves are on the host until the backward
    of its unit. Those of the last segment, which has the head and the loss, are there until
    backward begins.
    """

    def __init__(
        self, plan: Plan, workload: Workload, configuration: Configuration, *, adds_rows: bool
    ) -> None:
        self._adds_rows = adds_rows  # as in `Segment.added_rows_bytes`
        # By unit, as in `Segment.in_slot_bytes`.
        self._in_slots = [_computes_in_slots(unit, configuration) for unit in plan.units]
        self._segments = workload.segments
        forward = workload.segments[: workload.forward_segments]
        saved = [max(0, one.end_bytes - one.start_bytes) for one in forward]
        fused = [0] * len(forward)
        if configuration.compiled and configuration.checkpointing == "none":
            experts = {index for index, unit in enumerate(plan.units) if unit.has_own_ranks}
            fused = _fused_bytes(forward, saved, experts)
        # Bytes of each forward segment that are not on the device until its unit's backward.
        absent = saved if configuration.activation_offload else fused
        self.host_bytes = sum(absent) - sum(fused)
        self.device_bytes = forward[-1].end_bytes - sum(absent)
        first = {one.unit: index for index, one in reversed(list(enumerate(forward)))}
        self._absent = list(accumulate(absent[:-1], initial=0))  # by segment
        last = len(forward) - 1
        for segment in workload.segments[len(forward) :]:
            if first[segment.unit] > 0:  # not the root, which encloses all others
                last = min(last, first[segment.unit])
            self._absent.append(sum(absent[:last]) + fused[last])

    def bytes_of(self, index: int) -> tuple[int, int]:
        """Return the activations on the device at the peak of a segment and at its end."""
        segment, absent = self._segments[index], self._absent
        after = absent[index + 1] if index + 1 < len(self._segments) else 0
        # An upper bound if both hold, because the peaks without them may be at different moments.
        not_allocated = max(
            segment.added_rows_bytes * self._adds_rows,
            segment.in_slot_bytes * self._in_slots[segment.unit],
        )
        peak = segment.peak_bytes - not_allocated
        return max(0, peak - absent[index]), max(0, segment.end_bytes - after)


def _computes_in_slots(unit: UnitPlan, configuration: Configuration) -> bool:
    """Whether the engine computes weight gradients of linear layers in the unit's reduce buffer.

    Gradients of a unit with child units wait outside of it. There the gradient in the trace is the
    one that waits. Layers of tensor parallelism, whose inputs are DTensors, allocate gradients.
    """
    has_other_layers = configuration.tensor > 1 or configuration.float8 != "none"
    waits = unit.has_child_units and not unit.holds_gradients
    if configuration.stack != "shardwise" or has_other_layers or waits:
        return False
    return all(
        layout.cast.compute_dtype == layout.cast.reduce_dtype
        for layout in unit.trainable_layouts
        if any(takes_slot(extent.parameter.num_elements) for extent in layout.extents)
    )


def _fused_bytes(forward: Sequence[Segment], saved: Sequence[int], experts: set[int]) -> list[int]:
    """Return the part of the ``saved`` bytes that compiled forward segments do not save.

    A compiler recomputes element-wise operations in backward, except those whose results a matrix
    product or attention reads, because these results must be in memory anyway. The products of
    ``experts`` (units) read what their block writes. The operations after the last unit are the
    loss, which is not compiled with the blocks.
    """
    fused: list[int] = []
    for segment, after, size in zip(forward[:-1], forward[1:], saved[:-1], strict=True):
        written: dict[int, int] = {}
        for storage, num_bytes in (pair for op in segment.operations for pair in op.writes):
            written[storage] = max(num_bytes, written.get(storage, 0))
        readers = [*segment.operations, *(after.operations if after.unit in experts else ())]
        products = (op for op in readers if op.kind in (Kind.MATMUL, Kind.ATTENTION))
        used = {storage for op in products for storage, _ in (*op.reads, *op.writes)}
        fused.append(max(0, size - sum(written.get(storage, 0) for storage in used)))
    # The last segment counts as an earlier one: of experts if it is that of experts.
    is_last = forward[-1].unit in experts
    alike = [n for n, one in zip(fused, forward, strict=False) if (one.unit in experts) == is_last]
    return [*fused, *(alike[-1:] or [0])]


def _trained_bytes(plan: Plan, *, offloaded: bool) -> int:
    return sum(layout.shard_bytes for layout in trained_layouts(plan, offloaded=offloaded))


def _stream_bytes(timeline: tuple[Moment, ...], loaded_bytes: int) -> int:
    """Return what a caching allocator reserves because streams do not share blocks.

    Gathers and reductions run on separate streams, so each kind reserves its own peak. So do those
    of shardwise: from torch 2.13 on, their arena stays allocated while nothing is gathered. The
    stream of compute has at least what loading the model left to it: the shards and
    ``loaded_bytes``.
    """
    own = ("gathered", "communication")
    by_stream = [[getattr(moment, name) for name in own] for moment in timeline]
    rest = max(m.total - sum(own) for m, own in zip(timeline, by_stream, strict=True))
    rest = max(rest, timeline[0].parameters + loaded_bytes)
    kept: int = rest + sum(max(sizes) for sizes in zip(*by_stream, strict=True))
    return kept - max(moment.total for moment in timeline)


def _loaded_bytes(plan: Plan) -> int:
    """Return the free blocks that FSDP1 leaves when it shards a model that rank 0 broadcasts.

    A unit is then there three times: its parameters as moved to the device, flattened for the
    broadcast, and as a flat parameter (`_init_param_handle_from_module` in torch's
    fsdp/_init_utils.py, with ``sync_module_states=True``). The next unit uses the same blocks.
    """
    return 3 * max(
        sum(layout.shard_bytes * layout.world_size for layout in unit.layouts)
        for unit in plan.units
    )


def _split_bytes(plan: Plan, workload: Workload, timeline: tuple[Moment, ...]) -> int:
    """Return what a caching allocator reserves because optimizer states split its blocks.

    States are created at the end of the first step, in large enough blocks that its activations
    left. The second step must then allocate new blocks for its activations.
    """
    states = timeline[0].optimizer
    shards = [layout.shard_bytes for layout in trained_layouts(plan, offloaded=False)]
    written = [size for one in workload.operations for _, size in one.writes]
    if not states or not written:
        return 0
    typical = sum(size * size for size in shards) / sum(shards)  # shard size of an average byte
    fitting = sum(size for size in written if size >= typical) / sum(written)
    return min(states, round(fitting * max(moment.activations for moment in timeline)))


_CONTEXT_BYTES = 500 << 20
_COMMUNICATOR_BYTES = 500 << 20


def _overhead_bytes(configuration: Configuration) -> int:
    axes = [configuration.shard_ranks, configuration.replicas]
    if configuration.expert == 1:
        own = []
    else:  # of the ranks with the same experts, and of those that exchange tokens
        own = [size // n for size, n in zip(axes, configuration.expert_axes, strict=True)]
    if not configuration.row.shards:
        axes, own = [prod(axes)], [prod(own)]
    own += [configuration.expert]
    groups = (*axes, *own, configuration.tensor)
    return _CONTEXT_BYTES + _COMMUNICATOR_BYTES * sum(size > 1 for size in groups)
