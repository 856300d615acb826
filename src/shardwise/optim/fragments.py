"""Fragments: the parts of a model that are synchronized at different times."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from shardwise.blockwise import FORMATS, Blocks
from shardwise.optim.outer import Outer, partition
from shardwise.runtime.engine import Runtime
from shardwise.tensor.sharding import local_of

__all__ = ["Fragment", "fragments_of"]


@dataclass(frozen=True, eq=False)
class Fragment:
    """Parameters that are synchronized together, and the format of their differences."""

    parameters: Sequence[Tensor]
    dtype: str  # see `Outer`
    block: int

    @cached_property
    def sizes(self) -> list[int]:
        """The number of real numbers in this rank's shard of each parameter."""
        return [_real(local_of(p)).numel() for p in self.parameters]

    @property
    def packed_bytes(self) -> int:
        """The number of bytes that `pack` returns."""
        if self.dtype in FORMATS:
            return Blocks(self.dtype, self.block).num_bytes(sum(self.sizes))
        return sum(self.sizes) * self._torch_dtype.itemsize

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Encode one tensor per parameter as uint8 [packed_bytes], on the same device."""
        flat = torch.cat([_real(tensor).reshape(-1).to(self._wide_dtype) for tensor in tensors])
        if self.dtype not in FORMATS:
            return flat.to(self._torch_dtype).view(torch.uint8)
        packed = torch.zeros(self.packed_bytes, dtype=torch.uint8, device=flat.device)
        Blocks(self.dtype, self.block).encode(flat, packed)
        return packed

    def mean(self, packed: Sequence[Tensor]) -> list[Tensor]:
        """The mean of packed tensors, as a 1-D tensor per parameter, in the parameter's dtype.

        The same bytes in the same order give the same bits.
        """
        device = local_of(self.parameters[0]).device
        total = torch.zeros(sum(self.sizes), dtype=self._wide_dtype, device=device)
        for one in packed:
            if self.dtype in FORMATS:
                values = torch.empty_like(total)
                Blocks(self.dtype, self.block).decode(one.to(device), values)
                total += values
            else:
                total += one.to(device).view(self._torch_dtype)
        parts = torch.split(total.div_(len(packed)), self.sizes)
        return [_as_dtype(part, p.dtype) for part, p in zip(parts, self.parameters, strict=True)]

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def _wide_dtype(self) -> torch.dtype:
        """The dtype in which differences are averaged."""
        return torch.float64 if self.dtype == "float64" else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_dtype(part: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        part = torch.complex(*part.view(-1, 2).unbind(1))
    return part.to(dtype)


def fragments_of(runtime: Runtime, outer: Outer) -> list[Fragment]:
    """Divide the trainable parameters of ``runtime`` into ``outer.fragments`` sets of units."""
    units = [
        [p.sharded for p in unit.parameters if p.sharded.requires_grad] for unit in runtime.units
    ]
    parts = partition([sum(p.numel() for p in unit) for unit in units], outer.fragments)
    return [
        Fragment(list(chain.from_iterable(units[i] for i in part)), outer.dtype, outer.block)
        for part in parts
    ]
