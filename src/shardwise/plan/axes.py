"""Bytes sent, by mesh axis."""

from dataclasses import dataclass

__all__ = ["NOTHING", "AxisBytes"]


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """The bytes that one rank sends over each axis of the mesh.

    With strategies that shard nothing, such as ``"ddp"``, all of them are in ``replicate``.
    """

    shard: int = 0  # to ranks in its own row of the mesh
    replicate: int = 0  # to ranks in other rows
    outer: int = 0  # to other replicas of `sw.outer_optimizer`

    @property
    def total(self) -> int:
        return self.shard + self.replicate + self.outer

    def __add__(self, other: "AxisBytes") -> "AxisBytes":
        return AxisBytes(
            self.shard + other.shard,
            self.replicate + other.replicate,
            self.outer + other.outer,
        )


NOTHING = AxisBytes()
