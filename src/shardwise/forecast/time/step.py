"""The time of a training step: the engine's schedule, replayed with durations of a machine model.

All ranks do the same work, so one rank is replayed and its time is scaled to the expected time of
the slowest rank. With many micro-batches, a middle one is replayed once and counted as often as it
runs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.machine import Group, Machine, SegmentCost
from shardwise.forecast.states import enclosing_units, stepped_bytes
from shardwise.forecast.time.groups import UnitGroups, groups_of, ranks_of_experts
from shardwise.forecast.time.owned import PlannedOwners
from shardwise.forecast.time.replay import Costs, Part, Program, Replayed, replay
from shardwise.forecast.time.wires import packed_bytes, reduced_bytes, slot_bytes
from shardwise.forecast.work import Kind, Operation, Segment, Workload
from shardwise.plan.plan import Plan
from shardwise.plan.strategy import Level
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import EventKind

__all__ = ["StepTime", "step_time"]

_REPLAYED_PASSES = 3  # the first micro-batch, one in the middle, and the last
_UNFUSED_UPDATE = 2.5  # factor on the passes of an optimizer that is not fused
# Bytes per element that an outer step reads and writes: differences, shared parameters, momentum.
_OUTER_BYTES = 10 * 4
_RESIDUAL_BYTES = 5 * 4  # the same for rounding errors: to add them, round again and subtract
_CLIP_PASSES = 3.0  # to compute the gradient norm and scale the gradients
_FUSED_KERNELS = 2  # compiled kernels between two matrix products


@dataclass(frozen=True)
class StepTime:
    """The time of one training step of a rank."""

    seconds: float
    tokens_per_second: float  # per device
    model_flops: float  # per step, a mean over devices, without recomputation; see `mfu`
    hardware_flops: float  # the same with recomputation
    peak_flops: float  # per device
    exposed_seconds: float  # time that compute waits for collectives
    breakdown: Mapping[str, float]  # seconds by cause, which sum to the step
    bound: str  # the largest cause
    replayed: Replayed  # the replay of up to three micro-batches

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs utilization: ``model_flops / seconds / peak_flops``.

        It counts matrix products and attention in forward and backward, as if attention were not
        causal (PaLM, arXiv 2204.02311, appendix B), relative to the dense 16-bit peak.
        """
        return self.model_flops / self.seconds / self.peak_flops

    @cached_property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: like `mfu`, with recomputation.

        Recomputation includes activation checkpointing and the scores in the backward of attention
        kernels, which PyTorch's ``FlopCounterMode`` counts, too.
        """
        return self.hardware_flops / self.seconds / self.peak_flops


def step_time(
    plan: Plan,
    workload: Workload,
    machine: Machine,
    configuration: Configuration,
    whole: Workload | None = None,
) -> StepTime:
    """Predict one training step.

    Args:
        plan: the plan of one tensor-parallel rank's part of a pipeline stage.
        workload: one micro-batch on that rank.
        machine: the machine that runs it.
        configuration: how the model is trained.
        whole: one micro-batch of all stages, whose mean of FLOPs is counted; None: all stages have
            those of ``workload``.
    """
    machine = machine.under(configuration)
    return _Step(plan, workload, machine, configuration, whole).result()


@dataclass(frozen=True)
class _Step:
    plan: Plan
    workload: Workload
    machine: Machine
    configuration: Configuration
    whole: Workload | None = None

    def result(self) -> StepTime:
        passes = min(self.configuration.accumulation, _REPLAYED_PASSES)
        replayed = self._replay(passes)
        seconds, exposed = replayed.seconds, replayed.exposed_seconds[0]
        repeats = self.configuration.accumulation - passes
        if repeats:
            shorter = self._replay(passes - 1)
            seconds += repeats * (replayed.seconds - shorter.seconds)
            exposed += repeats * (replayed.exposed_seconds[0] - shorter.exposed_seconds[0])
        return self._step_time(replayed, seconds, exposed)

    def _step_time(self, replayed: Replayed, seconds: float, exposed: float) -> StepTime:
        """Combine ``seconds`` and ``exposed`` of all micro-batches with the rest of the step."""
        configuration = self.configuration
        micro_batches = configuration.accumulation
        costs = self._costs
        work = {kind.value: sum(one.by_kind[kind] for one in costs) for kind in Kind}
        compute = {name: seconds * micro_batches for name, seconds in work.items()}
        host = (sum(cost.seconds for cost in costs) - sum(work.values())) * micro_batches
        sends = self._send_seconds() * micro_batches
        bubble = (seconds + sends) * (configuration.pipeline - 1) / micro_batches
        bubble /= configuration.chunks
        update, owners = self._update_seconds(), self._owner_seconds()
        trained = (one.extents for unit in self.plan.units for one in unit.trainable_layouts)
        engine = self.machine.engine_seconds(sum(map(len, trained)))
        inner = seconds + sends + bubble + update + owners + engine
        outer = self._outer_seconds(inner)
        breakdown = compute | {
            "host": host + engine,
            "exposed communication": exposed,
            "interference": seconds - exposed - host - sum(compute.values()),
            "pipeline bubble": bubble,
            "pipeline sends": sends,
            "optimizer": update,
            "owners": owners,
            "outer": outer,
        }
        total = inner + outer
        slowest = self.machine.straggler_factor(configuration.world_size)
        breakdown["stragglers"] = total * (slowest - 1.0)
        total *= slowest
        tokens = configuration.tokens_per_step / configuration.world_size
        model, hardware = (flops * micro_batches for flops in self._flops())
        return StepTime(
            seconds=total,
            tokens_per_second=tokens / total,
            model_flops=model,
            hardware_flops=hardware,
            peak_flops=self.machine.device.peak_flops,
            exposed_seconds=exposed,
            breakdown={name: one for name, one in breakdown.items() if one > 0},
            bound=max(breakdown, key=lambda name: breakdown[name]),
            replayed=replayed,
        )

    def _flops(self) -> tuple[float, float]:
        """Return FLOPs of a micro-batch on one rank, without recomputation and with it."""
        if self.whole is None:
            return _flops(self.workload.operations)
        model, hardware = _flops(self.whole.operations)
        stages = self.configuration.pipeline
        return model / stages, hardware / stages

    # -- the replay ------------------------------------------------------------------------------

    def _replay(self, num_passes: int) -> Replayed:
        parts = tuple(
            Part(segment.kind, self._index_of[self.workload.units[segment.unit]], cost.seconds)
            for segment, cost in zip(self.workload.segments, self._costs, strict=True)
        )
        transfer = cache(self._transfer_seconds)
        return replay(
            self.plan.units,
            [Program((parts,) * num_passes)],
            Costs(transfer, interference=self.machine.constants.interference, has_one_link=True),
            prefetch=self.plan.prefetch,
            holds_gradients=self.configuration.row.inner < Level.GRADIENTS,
        )

    def _transfer_seconds(self, kind: EventKind, index: int) -> float:
        """Predict a collective, with the copies of offloaded shards from and to the host."""
        unit, machine = self.plan.units[index], self.machine
        quantized = self._wire_seconds(kind, unit)
        seconds = self._collective_seconds(kind, unit) if quantized is None else quantized
        if unit.offload is None or kind is EventKind.RESHARD_TO_SUBGROUP:
            return seconds
        if kind is EventKind.REDUCE:
            copied = unit.gradient_shard_bytes * unit.offloads_gradients
            return seconds + machine.copy_seconds(copied)
        return seconds + machine.copy_seconds(unit.shard_bytes * unit.offload.parameters)

    def _collective_seconds(self, kind: EventKind, unit: UnitPlan) -> float:
        """Predict a collective of a unit, whose flat buffers are sent one after the other."""
        machine, groups = self.machine, self._groups_of(unit)
        if kind is EventKind.REDUCE:
            sizes = [layout.reduced_bytes for layout in unit.trainable_layouts]
            own = sum(machine.reduce_scatter_seconds(one, groups.row) for one in sizes)
            if groups.column.size == 1:
                return own
            is_cut = self.plan.strategy.is_two_level
            over = machine.reduce_scatter_seconds if is_cut else machine.all_reduce_seconds
            return own + sum(over(one / groups.row.size, groups.column) for one in sizes)
        if kind is EventKind.RESHARD_TO_SUBGROUP:
            if not unit.two_level_gather:
                return 0.0  # a part of the gathered unit is kept
            return machine.all_gather_seconds(unit.kept_bytes, groups.column)
        # Forward gathers over all ranks, backward within the subgroup: take the mean.
        has_both = unit.subgroup > 0 and not unit.two_level_gather
        inside = self._gather_seconds(unit, groups.near)
        return (inside + self._gather_seconds(unit, groups.all)) / 2 if has_both else inside

    def _gather_seconds(self, unit: UnitPlan, group: Group) -> float:
        sizes = (layout.gathered_bytes for layout in unit.layouts if layout.needs_gather)
        return sum(self.machine.all_gather_seconds(one, group) for one in sizes)

    def _groups_of(self, unit: UnitPlan) -> UnitGroups:
        return groups_of(self.plan, unit, self.configuration)

    def _wire_seconds(self, kind: EventKind, unit: UnitPlan) -> float | None:
        """Predict a collective that is quantized, with encoding and decoding; None if it is not.

        All ranks send their codes to all others. Encoding reads numbers and writes codes, and
        decoding the reverse. What a subgroup gathers is exact.
        """
        wire, groups = unit.options.wire, self._groups_of(unit)
        if kind is EventKind.REDUCE:
            return None if wire.reduce is None else self._quantized_sum(unit, groups)
        if wire.gather is None:
            return None
        if unit.two_level_gather and kind is EventKind.RESHARD_TO_SUBGROUP:
            return self._quantized_gather(unit, groups.column, unit.kept_bytes)
        if unit.two_level_gather or kind is not EventKind.GATHER:
            return None
        seconds = self._quantized_gather(unit, groups.all, unit.gathered_bytes)
        return (seconds + self._gather_seconds(unit, groups.near)) / 2 if unit.subgroup else seconds

    def _quantized_gather(self, unit: UnitPlan, group: Group, exact_bytes: int) -> float:
        if group.size == 1:
            return 0.0
        coded = group.size * slot_bytes(unit)
        seconds = self.machine.all_gather_seconds(coded, group)
        return seconds + self.machine.memory_seconds(2 * exact_bytes + 2 * coded)

    def _quantized_sum(self, unit: UnitPlan, groups: UnitGroups) -> float:
        seconds = coded = 0.0
        for layout in unit.trainable_layouts:
            blocks = unit.reduce_blocks(layout)
            if blocks is None:
                continue
            sent = reduced_bytes(self.plan, unit, layout, blocks)
            coded += sent.shard + sent.replicate
            for one, over in ((sent.shard, groups.row), (sent.replicate, groups.column)):
                whole = one * over.size / max(1, over.size - 1)
                seconds += self.machine.all_to_all_seconds(whole, over)
        if not coded:
            return 0.0
        return seconds + self.machine.memory_seconds(2 * unit.gradient_bytes + 2 * coded)

    def _outer_seconds(self, step_seconds: float) -> float:
        """Predict the exchange of differences with other replicas, as a mean over steps."""
        outer, configuration = self.configuration.outer, self.configuration
        if outer is None:
            return 0.0
        replicas = configuration.outer_replicas
        elements = sum(one.shard_elements for u in self.plan.units for one in u.trainable_layouts)
        sent = packed_bytes(outer.dtype, outer.block, elements)
        group = Group(replicas, configuration.world_size // replicas)
        exchange = self.machine.all_gather_seconds(sent * replicas, group)
        hidden = outer.delay * step_seconds
        touched = _OUTER_BYTES + _RESIDUAL_BYTES * outer.is_quantized
        update = self.machine.memory_seconds(elements * touched)
        return (max(0.0, exchange - hidden) + update) / outer.every

    # -- compute ---------------------------------------------------------------------------------

    @cached_property
    def _costs(self) -> tuple[SegmentCost, ...]:
        """Costs of all segments; copies of a block share their operations."""
        pricing = _Pricing(self.machine, self.configuration, self.workload, _head_rows(self.plan))
        found: dict[int, SegmentCost] = {}
        for segment in self.workload.segments:
            if id(segment.operations) not in found:
                found[id(segment.operations)] = pricing.cost(segment.operations)
        return tuple(
            self._in_engine(segment, found[id(segment.operations)])
            for segment in self.workload.segments
        )

    def _in_engine(self, segment: Segment, cost: SegmentCost) -> SegmentCost:
        """Add the engine's work, and copies of activations to the host, which overlap compute."""
        unit = self.plan.units[self._index_of[self.workload.units[segment.unit]]]
        engine = self.machine.segment_seconds(unit)
        copied = 0.0
        if self.configuration.activation_offload:
            copied = self.machine.copy_seconds(abs(segment.end_bytes - segment.start_bytes))
        return replace(cost, host=max(cost.host, copied), engine=engine)

    @cached_property
    def _index_of(self) -> Mapping[str, int]:
        """The number of each unit of the plan."""
        return {unit.name: number for number, unit in enumerate(self.plan.units)}

    def _send_seconds(self) -> float:
        """Predict a micro-batch's sends between stages: activations, and then their gradients."""
        configuration = self.configuration
        if configuration.pipeline == 1:
            return 0.0
        stride = configuration.world_size // configuration.pipeline
        seconds = self.machine.send_seconds(self.workload.sent_bytes, stride)
        return 2 * configuration.chunks * seconds

    def _update_seconds(self) -> float:
        """Predict the optimizer's update, on the device or in host memory."""
        shards = sum(unit.gradient_shard_bytes for unit in self.plan.units)
        passes = self.configuration.states.passes
        if self.configuration.optimizer_loop != "fused":
            passes *= _UNFUSED_UPDATE
        clipping = _CLIP_PASSES * self.configuration.clips
        update = self.machine.update_seconds(shards, passes + clipping)
        if self.configuration.offload == "none":
            return update
        if self.configuration.offload_step == "device":
            # Both directions are copied at once, and while other units are stepped.
            stepped = sum(stepped_bytes(unit, self.configuration) for unit in self.plan.units)
            copies = self.machine.copy_seconds(stepped)
            hidden = self._backward_seconds if self.configuration.step_in_backward else 0.0
            return update + max(0.0, copies - update - hidden)
        # Gradients are copied to the host and parameters back. Host memory is slower as well.
        return self.machine.copy_seconds(shards * (2 + passes))

    @property
    def _backward_seconds(self) -> float:
        """The compute of one backward."""
        return sum(cost.seconds for cost in self._costs[self.workload.forward_segments :])

    def _owner_seconds(self) -> float:
        """Predict the exchange with owners of matrices and their work, after the backward."""
        optimizer = self.configuration.optimizer
        if not self.configuration.states.has_owners:
            return 0.0
        itemsize = 2 if optimizer == "muon" and not self.machine.computes_on_cpu else 4
        units = {unit.has_own_ranks: unit for unit in self.plan.units}
        return sum(
            PlannedOwners(self.plan, optimizer, itemsize, own_ranks).seconds(
                self.machine, self._groups_of(unit).world
            )
            for own_ranks, unit in units.items()
        )


def _head_rows(plan: Plan) -> int:
    """Return the rows of the largest matrix outside of the blocks, the head or the embedding."""
    units = map(plan.units.__getitem__, enclosing_units(plan))
    shapes = (one.shape for unit in units for one in unit.parameters)
    return max((shape[0] for shape in shapes if len(shape) > 1), default=0)


# Attention kernels recompute the scores in backward: of their five products, one is recomputation.
_NEEDED_BACKWARD = 4 / 5


def _flops(operations: Iterable[Operation]) -> tuple[float, float]:
    """Return FLOPs without recomputation and with it."""
    model = hardware = 0.0
    for operation in operations:
        hardware += operation.flops
        if not operation.is_recomputed:
            recomputes = operation.kind is Kind.ATTENTION and "backward" in operation.name
            model += operation.flops * (_NEEDED_BACKWARD if recomputes else 1.0)
    return model, hardware


class _Pricing:
    """Predicts the seconds of operations."""

    def __init__(
        self,
        machine: Machine,
        configuration: Configuration,
        workload: Workload,
        head_rows: int = 0,
    ) -> None:
        self._machine, self._compiled = machine, configuration.compiled
        self._float8, self._gathers_float8 = configuration.float8, configuration.float8_gather
        self._tokens, self._head_rows = workload.tokens, head_rows
        self._groups = {
            "tensor": Group(configuration.tensor),
            "context": Group(configuration.context, configuration.tensor),
            "expert": ranks_of_experts(configuration),
        }
        distinct = {id(one.operations): one.operations for one in workload.segments}
        self._reads = Counter(
            storage for one in distinct.values() for op in one for storage, _ in op.reads
        )

    def cost(self, operations: Sequence[Operation]) -> SegmentCost:
        """Predict the operations of a segment."""
        constants = self._machine.constants
        totals = dict.fromkeys(Kind, 0.0)
        launches = 0
        for kind, group in groupby(operations, key=lambda operation: operation.kind):
            run = list(group)
            if kind is Kind.MEMORY and self._compiled:
                num_bytes = fused_bytes(run, self._reads)
                kernels = min(len(run), _FUSED_KERNELS)
                totals[kind] += self._machine.memory_seconds(num_bytes)
                totals[kind] += kernels * constants.kernel_seconds
                launches += kernels
            else:
                totals[kind] += sum(map(self._seconds, run))
                launches += len(run)
        host = launches * constants.operation_seconds + constants.unit_seconds
        return SegmentCost(totals, host)

    def _seconds(self, operation: Operation) -> float:
        if operation.kind is Kind.COLLECTIVE:
            return self._collective_seconds(operation)
        if self._is_float8(operation):
            _, m, n, k = operation.shape
            weight = k * n if self._gathers_float8 and m == self._tokens else 0
            return self._machine.float8_seconds(operation.shape, self._float8, weight)
        return self._machine.operation_seconds(operation)

    def _is_float8(self, operation: Operation) -> bool:
        """Whether the operation is a product of a linear layer of a block, in 8 bits."""
        is_wide = operation.itemsize != 2  # noqa: PLR2004 - bytes
        if self._float8 == "none" or operation.kind is not Kind.MATMUL or is_wide:
            return False
        batch, *sizes = operation.shape
        if self._tokens in sizes:  # it may be equal to the rows of the head
            sizes.remove(self._tokens)
        return batch == 1 and self._head_rows not in sizes

    def _collective_seconds(self, operation: Operation) -> float:
        size = max(sum(size for _, size in own) for own in (operation.reads, operation.writes))
        if self._gathers_float8 and operation.axis == "tensor" and operation.name == "all_gather":
            size //= operation.itemsize  # activations, and gradients in backward, in 8 bits
        predict: Callable[[float, Group], float]  # such as `all_gather_seconds`
        predict = getattr(self._machine, f"{operation.name}_seconds")
        return predict(size, self._groups[operation.axis])


def fused_bytes(run: Sequence[Operation], reads: Mapping[int, int]) -> int:
    """Return the bytes that consecutive operations move when they are compiled into one kernel.

    Args:
        run: the operations.
        reads: how often each storage is read by all operations.
    """
    inside = Counter(storage for operation in run for storage, _ in operation.reads)
    written: dict[int, int] = {}
    read: dict[int, int] = {}
    for operation in run:
        for storage, size in operation.reads:
            if storage not in written:
                read[storage] = max(size, read.get(storage, 0))
        for storage, size in operation.writes:
            written[storage] = max(size, written.get(storage, 0))
    leaving = (
        size
        for storage, size in written.items()
        if not inside[storage] or reads[storage] > inside[storage]
    )
    return sum(read.values()) + sum(leaving)
