"""Tensors over addresses, as a launched kernel sees them."""

import ctypes

import torch
from torch import Tensor

__all__ = ["poison", "poison_bytes", "raw"]

_POISON = 0xFF  # in each byte: NaN in every floating dtype, -1 in integers


def raw(tensor: Tensor) -> Tensor:
    """Return a tensor at the address of ``tensor``, which does not keep the memory alive."""
    if not tensor.numel():
        return tensor.detach()
    span = 1 + sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    num_bytes = span * tensor.element_size()
    memory = (ctypes.c_byte * num_bytes).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    whole = torch.empty(0, dtype=tensor.dtype).set_(flat.untyped_storage(), 0, (span,), (1,))
    return whole.as_strided(tensor.shape, tensor.stride())


def poison(tensor: Tensor) -> None:
    """Fill a dense tensor with NaN."""
    if tensor.numel() and tensor.is_contiguous():
        poison_bytes(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def poison_bytes(address: int, num_bytes: int) -> None:
    ctypes.memset(address, _POISON, num_bytes)
