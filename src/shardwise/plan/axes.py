"""Bytes sent, by mesh axis."""

from dataclasses import dataclass

__all__ = ["NOTHING", "AxisBytes"]


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """The bytes that one rank sends over each axis of the mesh.

    With strategies that shard nothing, such as ``"ddp"``, all of them are in ``replicate``. With
    ``reshard_after_forward=k``, ``shard - subgroup`` are sent between groups of k ranks.
    """

    shard: int = 0  # to ranks in its own row of the mesh
    replicate: int = 0  # to ranks in other rows
    outer: int = 0  # to other replicas of `sw.outer_optimizer`
    # The part of ``shard`` that gathers and reductions send to ranks of its own subgroup, the
    # neighbors of ``reshard_after_forward=k``; 0 for units without subgroups.
    subgroup: int = 0

    @property
    def total(self) -> int:
        return self.shard + self.replicate + self.outer

    def __add__(self, other: "AxisBytes") -> "AxisBytes":
        return AxisBytes(
            self.shard + other.shard,
            self.replicate + other.replicate,
            self.outer + other.outer,
            self.subgroup + other.subgroup,
        )


NOTHING = AxisBytes()
