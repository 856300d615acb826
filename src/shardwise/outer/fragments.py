"""Parts of a model that are synchronized at different times."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from shardwise.outer.packing import packed_bytes, wide_dtype
from shardwise.plan.outer import Outer, partition
from shardwise.runtime.engine import Runtime
from shardwise.tensor.sharding import local_of

__all__ = ["Fragment", "fragments_of"]


@dataclass(frozen=True, eq=False)
class Fragment:
    """Parameters that are synchronized together."""

    parameters: Sequence[Tensor]
    dtype: str
    block: int

    @cached_property
    def sizes(self) -> list[int]:
        """Of this rank's shards."""
        return [local_of(p).numel() for p in self.parameters]

    @property
    def num_elements(self) -> int:
        return sum(self.sizes)

    @property
    def packed_bytes(self) -> int:
        return packed_bytes(self.num_elements, self.dtype, self.block)

    @property
    def device(self) -> torch.device:
        return local_of(self.parameters[0]).device

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """All of them as one [n]."""
        return torch.cat([tensor.reshape(-1).to(wide_dtype(self.dtype)) for tensor in tensors])

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """The reverse, each 1-D."""
        return torch.split(flat, self.sizes)


def fragments_of(runtime: Runtime, outer: Outer) -> list[Fragment]:
    units = [
        [p.sharded for p in unit.parameters if p.sharded.requires_grad] for unit in runtime.units
    ]
    parts = partition([sum(p.numel() for p in unit) for unit in units], outer.fragments)
    return [
        Fragment(list(chain.from_iterable(units[i] for i in part)), outer.dtype, outer.block)
        for part in parts
    ]
