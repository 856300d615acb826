"""States that one rank has as a whole."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import RunSharding, ShardedTensor
from shardwise.tensor.sharding import local_of

__all__ = ["owned_tensor", "whole_of"]


def owned_tensor(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    owner: int,
    mesh: DataParallelMesh | None,
) -> Tensor:
    """Zeros of ``shape`` on the rank ``owner``; on others, a tensor of that shape with no elements.

    It is a `ShardedTensor` of ``mesh``, which is `cut_over_all`, so checkpoints save and load it at
    any number of ranks. Without a mesh it is a plain tensor.
    """
    if mesh is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    spec = ParameterSpec((name,), tuple(shape), str(dtype)[6:], dtype.itemsize, trainable=False)
    size = max(1, prod(shape))  # of every shard, of which all but one are empty
    extent = ParameterExtent(spec, owner * size)
    layout = Layout((extent,), mesh.num_ranks, size)
    sharding = RunSharding(layout, extent, mesh, name, name)
    num_here = len(sharding.run)
    return ShardedTensor(torch.zeros(num_here, dtype=dtype, device=device), sharding)


def whole_of(state: Tensor) -> Tensor:
    """A view of all elements of an `owned_tensor`, on its owner."""
    return local_of(state).view(state.shape) if isinstance(state, DTensor) else state
