"""The ranks that take part in a verification, and what they tell each other."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import PlanError

__all__ = ["Peers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that a model is sharded over, and this one among them."""

    group: dist.ProcessGroup | None  # None where there is one only

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def refuse(self, problem: str | None) -> None:
        """Raise on every rank what the first one has found that found anything.

        Raises:
            PlanError: a rank has a problem. One that raised alone would leave the others waiting.
        """
        for rank, found in enumerate(self.gather(problem)):
            if found is not None:
                raise PlanError(found if rank == 0 else f"{found} (on rank {rank})")
