"""The ranks of the collectives of a unit, and how far apart they are.

The mesh is ``pipeline x replicas x shard_size x context x tensor``. With expert parallelism, ranks
with the same experts are not neighbors::

    shard_size=4, context=2, expert=2     rank  0  1  2  3  4  5  6  7
                                       experts  A  A  B  B  A  A  B  B
"""

from dataclasses import dataclass

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.machine import Group
from shardwise.forecast.time.wires import row_of
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan

__all__ = ["UnitGroups", "groups_of", "ranks_of_experts"]


@dataclass(frozen=True, slots=True)
class UnitGroups:
    """The groups of ranks of a unit's collectives."""

    all: Group  # the ranks that shard the unit
    row: Group  # of the mesh
    column: Group
    near: Group  # a subgroup, or all
    world: Group  # the ranks that have the unit: all rows


def groups_of(plan: Plan, unit: UnitPlan, configuration: Configuration) -> UnitGroups:
    """Return the groups of ``unit``, whose ranks are those of the model or of its experts."""
    tensor, ranks = configuration.tensor, unit.options
    row = Group(row_of(plan, unit), tensor)
    column = Group(ranks.replicas, tensor * row.size)
    if unit.has_own_ranks:
        row, column = _of_experts(configuration)
    world = row.times(column)
    shards = world if plan.strategy.is_two_level else row
    near = shards.first(unit.subgroup) if unit.subgroup else shards
    return UnitGroups(all=shards, row=row, column=column, near=near, world=world)


def ranks_of_experts(configuration: Configuration) -> Group:
    """Return the ranks that share the experts, which exchange tokens."""
    near, far = configuration.expert_axes
    stride = configuration.tensor * configuration.context
    return Group(near, stride).times(Group(far, stride * configuration.shard_size))


def _of_experts(configuration: Configuration) -> tuple[Group, Group]:
    """Return the row and the column of the ranks that have the same experts."""
    near, far = configuration.expert_axes
    stride = configuration.tensor * configuration.context  # on the axis of ``shard_size``
    shards = Group(configuration.shard_size // near, near * stride)
    row = Group(configuration.context, configuration.tensor).times(shards)
    column = Group(configuration.replicas // far, far * stride * configuration.shard_size)
    return (row, column) if configuration.row.shards else (Group(1), row.times(column))
