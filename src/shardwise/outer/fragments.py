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
        """Of this rank's shards, in real numbers."""
        return [_real(local_of(p)).numel() for p in self.parameters]

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
        """All of them as one [n]; complex numbers are pairs."""
        wide = wide_dtype(self.dtype)
        return torch.cat([_real(tensor).reshape(-1).to(wide) for tensor in tensors])

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """The reverse, each 1-D and of the dtype of its parameter."""
        return [
            _as_dtype(part, parameter.dtype)
            for part, parameter in zip(torch.split(flat, self.sizes), self.parameters, strict=True)
        ]


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_dtype(part: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        part = torch.complex(*part.view(-1, 2).unbind(1))
    return part.to(dtype)


def fragments_of(runtime: Runtime, outer: Outer) -> list[Fragment]:
    units = [
        [p.sharded for p in unit.parameters if p.sharded.requires_grad] for unit in runtime.units
    ]
    parts = partition([sum(p.numel() for p in unit) for unit in units], outer.fragments)
    return [
        Fragment(list(chain.from_iterable(units[i] for i in part)), outer.dtype, outer.block)
        for part in parts
    ]
