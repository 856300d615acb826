"""Exchanging small Python objects between the ranks of a verification."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.errors import PlanError

__all__ = ["RankExchange"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankExchange:
    """The ranks that a model is sharded over, seen from this one."""

    group: dist.ProcessGroup | None  # None for a single rank

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

    def raise_first(self, problem: str | None) -> None:
        """Raise the first problem that any rank found, on every rank.

        A rank that raised alone would leave the others waiting.

        Raises:
            PlanError: a rank found a problem.
        """
        for rank, found in enumerate(self.gather(problem)):
            if found is not None:
                raise PlanError(found if rank == 0 else f"{found} (on rank {rank})")
