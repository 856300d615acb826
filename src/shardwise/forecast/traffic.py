"""The bytes that a rank sends in a step, from the plan.

They are those that ranks on CPUs count (`HostCollectives.sent`): each rank sends its part of a
gather, and its addend of a sum, to every other rank of the group. On a ring of GPUs each of them
sends as much.
"""

from shardwise.blockwise import Blocks
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.plan.wire import Wire
from shardwise.schedule.events import EventKind
from shardwise.schedule.sequencer import schedule
from shardwise.transport.host.peers import INLINE_BYTES

__all__ = ["sent_bytes"]


def sent_bytes(plan: Plan) -> int:
    """What each rank sends in a step of one micro-batch, as it runs from the second on.

    It includes the flags by which ranks agree on the parameters that none of them used, a byte for
    each parameter, as `fully_shard` with ``unused="none"`` has it.
    """
    ranks = plan.num_ranks
    trained = [spec for unit in plan.units for spec in unit.parameters if spec.trainable]
    total, in_subgroup = len(trained) * (ranks - 1), set[int]()
    for event in schedule(plan):
        unit = plan.units[event.unit]
        match event.kind:
            case EventKind.GATHER if event.unit in in_subgroup:
                total += _gather(event.bytes, unit.subgroup)
            case EventKind.GATHER:
                total += _gather_of_shards(unit, _shards(plan, unit))
            case EventKind.RESHARD_TO_SUBGROUP:
                in_subgroup.add(event.unit)
                if unit.two_level_gather:
                    total += _gather_of_shards(unit, plan.replicas)
            case EventKind.FREE_SUBGROUP:
                in_subgroup.discard(event.unit)
            case EventKind.REDUCE:
                total += sum(_reduction(plan, unit, one) for one in unit.trainable_layouts)
    return total


def _shards(plan: Plan, unit: UnitPlan) -> int:
    return unit.num_shards or plan.world_size


def _gather(num_bytes: int, ranks: int) -> int:
    return num_bytes // ranks * (ranks - 1)


def _gather_of_shards(unit: UnitPlan, ranks: int) -> int:
    slots = 0
    for layout in unit.layouts:
        if layout.needs_gather:
            exact, blocks = layout.gathered_bytes // layout.world_size, unit.gathers(layout)
            slots += exact if blocks is None else blocks.num_bytes(layout.shard_elements)
    return slots * (ranks - 1)


def _reduction(plan: Plan, unit: UnitPlan, layout: Layout) -> int:
    """A reduce-scatter over a row of the mesh, and then over its columns or an all-reduce."""
    ranks, replicas = _shards(plan, unit), plan.replicas
    is_two_level = plan.strategy.is_two_level
    row = ranks // replicas if is_two_level else ranks
    if (blocks := unit.reduces(layout)) is not None:
        return _quantized(blocks, unit.wire, layout.num_elements, row, replicas, is_two_level)
    own = layout.reduced_bytes // row
    over_row = own * (row - 1)
    if is_two_level:
        return over_row + _gather(own, replicas)
    return over_row + _all_reduce(own, layout.cast.reduce_itemsize, replicas)


def _quantized(
    blocks: Blocks, wire: Wire, num_elements: int, row: int, replicas: int, is_two_level: bool
) -> int:
    """What `QuantizedSums` sends."""
    size, total = num_elements, 0
    for ranks, is_scattered in ((row, True), (replicas, is_two_level)):
        near = ranks if size < num_elements else min(wire.ranks_per_host or ranks, ranks)
        whole = size
        slot = -(-size // ranks)
        for among, elements in ((near, slot * ranks // near), (ranks // near, slot)):
            total += blocks.num_bytes(elements) * (among - 1)
        size = slot if is_scattered else whole
        total += 0 if is_scattered else blocks.num_bytes(slot) * (ranks - 1)
    return total


def _all_reduce(num_bytes: int, itemsize: int, ranks: int) -> int:
    """A reduce-scatter and a gather; what is small or left over goes to every rank whole."""
    if num_bytes <= INLINE_BYTES:
        return num_bytes * (ranks - 1)
    part = num_bytes // itemsize // ranks * itemsize
    rest = num_bytes - part * ranks
    return (2 * part + rest) * (ranks - 1)
