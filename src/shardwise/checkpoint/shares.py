"""Which bytes of a tensor are here, and which of them this rank writes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.crc import BLOCK_BYTES
from shardwise.plan.layout import Run
from shardwise.runtime.mesh import DataParallelMesh
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["Share", "bytes_of", "own_run", "share_to_write"]


@dataclass(frozen=True, slots=True)
class Share:
    """Elements of a tensor, from ``start`` on, in row-major order."""

    start: int
    elements: Tensor  # 1-D

    @property
    def start_byte(self) -> int:
        return self.start * self.elements.itemsize

    @property
    def stop_byte(self) -> int:
        return self.start_byte + self.elements.nbytes


def own_run(tensor: Tensor) -> Share:
    """What is here of ``tensor``, sharing its memory if that is contiguous."""
    if isinstance(tensor, ShardedTensor):
        return Share(tensor.sharding.run.start, tensor.to_local().detach())
    return Share(0, tensor.detach().reshape(-1))


def share_to_write(tensor: Tensor, number: int, rank: int) -> Share | None:
    """The part of ``tensor``, the ``number``-th of all, that this rank writes.

    Together the ranks write all of it, once: replicas share the work, and what is whole on every
    rank, such as a buffer, is written by rank 0.
    """
    share = own_run(tensor)
    if not isinstance(tensor, ShardedTensor):
        return share if rank == 0 else None
    part = _part(len(share.elements), share.elements.nbytes, number, tensor.sharding.axis)
    if not len(part):
        return None
    return Share(share.start + part.start, share.elements[part.start : part.stop])


def bytes_of(elements: Tensor) -> memoryview:
    """The bytes of ``elements`` [n]: its own memory where that is on the CPU and contiguous."""
    array: Any = elements.contiguous().cpu().view(torch.uint8).numpy()
    return memoryview(array)


def _part(num_elements: int, num_bytes: int, number: int, axis: DataParallelMesh) -> Run:
    """This replica's part of a run of that length."""
    copies = axis.num_ranks // axis.size
    if copies == 1:
        return Run(0, num_elements)
    place = axis.column.index
    if num_bytes < BLOCK_BYTES:  # too small to be cut
        return Run(0, num_elements if number % copies == place else 0)
    return Run(num_elements * place // copies, num_elements * (place + 1) // copies)
