"""Differences as the bytes that travel between replicas."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.blockwise import FORMATS, Blocks

__all__ = ["mean_of", "pack", "packed_bytes", "wide_dtype"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def packed_bytes(num_elements: int, dtype: str, block: int) -> int:
    """The size of what `pack` returns."""
    if dtype in FORMATS:
        return Blocks(dtype, block).num_bytes(num_elements)
    return num_elements * _DTYPES[dtype].itemsize


def pack(values: Tensor, dtype: str, block: int) -> Tensor:
    """``values`` [n] as uint8 [`packed_bytes`], on the same device."""
    if dtype not in FORMATS:
        return values.to(_DTYPES[dtype]).view(torch.uint8)
    size = packed_bytes(values.numel(), dtype, block)
    packed = torch.zeros(size, dtype=torch.uint8, device=values.device)
    Blocks(dtype, block).encode(values, packed)
    return packed


def mean_of(packed: Sequence[Tensor], num_elements: int, dtype: str, block: int) -> Tensor:
    """The mean [n] of what was packed, in `wide_dtype`: the same bits for the same bytes."""
    total = torch.zeros(num_elements, dtype=wide_dtype(dtype), device=packed[0].device)
    for one in packed:
        if dtype in FORMATS:
            values = torch.empty_like(total)
            Blocks(dtype, block).decode(one, values)
            total += values
        else:
            total += one.view(_DTYPES[dtype])
    return total.div_(len(packed))


def wide_dtype(dtype: str) -> torch.dtype:
    """In which differences are computed and averaged."""
    return torch.float64 if dtype == "float64" else torch.float32
