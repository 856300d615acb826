"""Exchange of small Python objects between the ranks of a verification."""

from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.verification.engines import data_dims

__all__ = ["RankExchange"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankExchange:
    """The ranks that a model is sharded over, from the point of view of this rank."""

    group: dist.ProcessGroup | None  # None for a single rank
    mesh: DeviceMesh | None = None  # given if it has dims other than data-parallel ones

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def num_parts(self) -> int:
        return self.size if self.mesh is None else prod(map(self.mesh.size, self._dims))

    @property
    def part(self) -> int:
        """Index of the part of a batch that this rank takes."""
        if self.mesh is None:
            return self.rank
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        own = 0
        for dim in self._dims:
            own = own * self.mesh.size(dim) + coordinate[dim]
        return own

    @property
    def dims(self) -> dict[str, int]:
        if self.mesh is None:
            return {}
        return dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=False))

    @property
    def _dims(self) -> list[int]:
        """Indices of the mesh dims that split a batch."""
        names = list(self.dims)
        return [names.index(name) for name in data_dims(self.mesh)]

    def gather(self, value: T) -> list[T]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_first(self, problem: str | None) -> None:
        """Raise the first problem found by any rank on every rank, as a PlanError.

        If only one rank raised, the others would wait for it.
        """
        for rank, found in enumerate(self.gather(problem)):
            if found is not None:
                raise PlanError(found if rank == 0 else f"{found} (on rank {rank})")
