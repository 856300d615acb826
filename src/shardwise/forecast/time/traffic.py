"""The bytes that a rank sends per step, by axis of the mesh, derived from the plan.

They equal the ledger's counter (`Ledger.sent_bytes`) and that of ranks on CPUs
(`HostCollectives.sent`): each rank sends its part of a gather, and its addend of a sum, to every
other rank of the group. On a ring of GPUs, each rank sends the same number of bytes.
"""

from shardwise.comm.api import all_reduce_bytes
from shardwise.forecast.time.replay import schedule
from shardwise.forecast.time.wires import reduced_bytes, row_of, slot_bytes
from shardwise.plan.axes import AxisBytes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan
from shardwise.schedule.events import EventKind

__all__ = ["sent_bytes"]


def sent_bytes(plan: Plan) -> AxisBytes:
    """Return what each rank sends in a step of one micro-batch, from the second step on.

    The result includes the flags with which ranks agree on parameters that no rank used: one byte
    per parameter, as in `fully_shard` with ``unused="none"``. An owner optimizer, such as `Muon`,
    additionally sends its own `sent_bytes`.
    """
    row, replicas = row_of(plan), plan.replicas
    trained = sum(spec.trainable for unit in plan.units for spec in unit.parameters)
    total = AxisBytes(trained * (row - 1), trained * row * (replicas - 1))
    in_subgroup = set[int]()
    for event in schedule(plan):
        unit = plan.units[event.unit]
        match event.kind:
            case EventKind.GATHER if event.unit in in_subgroup:
                sent = event.bytes // unit.subgroup * (unit.subgroup - 1)
                total += AxisBytes(sent, subgroup=0 if unit.two_level_gather else sent)
            case EventKind.GATHER:
                total += _gather_of_shards(plan, unit)
            case EventKind.RESHARD_TO_SUBGROUP:
                in_subgroup.add(event.unit)
                if unit.two_level_gather:
                    total += AxisBytes(replicate=slot_bytes(unit) * (unit.options.replicas - 1))
            case EventKind.FREE_SUBGROUP:
                in_subgroup.discard(event.unit)
            case EventKind.REDUCE:
                for layout in unit.trainable_layouts:
                    total += _reduction(plan, unit, layout)
    return total


def _gather_of_shards(plan: Plan, unit: UnitPlan) -> AxisBytes:
    """Count a gather of a unit's shards; with two levels, they are in several rows."""
    num_shards = unit.options.world_size
    row, slot = row_of(plan, unit), slot_bytes(unit)
    inner = slot * (unit.inner_ranks - 1)
    return AxisBytes(slot * (row - 1), slot * (num_shards - row), subgroup=inner)


def _reduction(plan: Plan, unit: UnitPlan, layout: Layout) -> AxisBytes:
    """Count a reduce-scatter over a mesh row, then a reduce-scatter or all-reduce over columns."""
    row, replicas = row_of(plan, unit), unit.options.replicas
    if (blocks := unit.reduce_blocks(layout)) is not None:
        return reduced_bytes(plan, unit, layout, blocks)
    own = layout.reduced_bytes // row
    over_columns = (
        own // replicas
        if plan.strategy.is_two_level
        else all_reduce_bytes(own, layout.cast.reduce_itemsize, replicas)
    )
    inner = own * (unit.inner_ranks - 1)
    return AxisBytes(own * (row - 1), over_columns * (replicas - 1), subgroup=inner)
