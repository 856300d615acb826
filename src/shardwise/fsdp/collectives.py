"""Exchanges over the user's process groups. Every rank of a group must call them, between steps."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["broadcast_object", "broadcast_tensors", "gather_objects", "join_parts"]


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the values of ``tensors`` from the first rank of ``group`` to all its ranks."""
    if group is None or dist.get_backend(group) == "fake":
        return
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.detach().contiguous()
            dist.broadcast(dense, group=group, group_src=0)
            tensor.copy_(dense)


def broadcast_object(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Return the ``value`` of the first rank of ``group`` on every rank. It is pickled."""
    values = [value]
    if group is not None and dist.get_backend(group) != "fake":
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the ``value`` of each rank of ``group`` on every rank. They are pickled."""
    if group is None or dist.get_backend(group) == "fake":
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def join_parts(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum ``tensor`` over ``group``, whose ranks each have some elements and zeros for the others.

    The bytes are summed, so every value is kept exactly, including negative zeros and NaNs.
    """
    if group is not None and dist.get_backend(group) != "fake":
        dist.all_reduce(tensor.view(-1).view(torch.uint8), group=group)
