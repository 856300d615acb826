"""Bytes by the axis of the mesh that they travel on."""

from dataclasses import dataclass

__all__ = ["NOTHING", "AxisBytes"]


@dataclass(frozen=True, slots=True)
class AxisBytes:
    """What one rank sends, by the ranks that it sends to.

    With strategies that shard nothing, such as ``"ddp"``, all other ranks are replicas.
    """

    shard: int = 0  # to ranks of its own row of the mesh
    replicate: int = 0  # to ranks of other rows
    outer: int = 0  # to other replicas of `sw.Outer`

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
