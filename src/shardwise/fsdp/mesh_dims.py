"""PyTorch's `DataParallelMeshDims`, or the same for torch 2.11, which does not have it."""

from dataclasses import dataclass
from typing import Any

from torch.distributed import fsdp

__all__ = ["DataParallelMeshDims"]

Names = str | tuple[str, ...] | None


@dataclass
class _DataParallelMeshDims:
    """The dims of a mesh over which `fully_shard` shards and replicates parameters."""

    shard: Names = None
    replicate: Names = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard=, replicate= or both, got none")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_tuple(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_tuple(self.replicate)


def _as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
