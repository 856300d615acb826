"""Shards full tensors that every rank has, or that the first rank sends."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.fsdp.sharded_tensors import TorchShardedTensor, part_of
from shardwise.fsdp.whole_mesh import as_parameter
from shardwise.runtime.tensor import local_of, mesh_of, sharding_of
from shardwise.transport.process_group import broadcast_object, broadcast_tensors

__all__ = ["distribute", "group_of", "shard_like"]


def distribute(states: Any, like: Any, source: dist.ProcessGroup | None = None) -> Any:
    """``states`` with each full tensor sharded as its counterpart in ``like``.

    Args:
        states: nested dicts of full tensors and other values.
        like: dicts of the same structure with sharded tensors. A tensor in the place of a dict is
            the counterpart of all tensors in that dict.
        source: the group whose first rank has ``states`` and sends them. The other ranks hold one
            full tensor at a time. None for one rank.
    """
    outline = states if source is None else broadcast_object(_outline(states), source)
    return _shard_all(outline, states, like, source)


def shard_like(value: Any, parameter: Tensor) -> Any:
    """A copy of ``value`` that is sharded as ``parameter``, of which it is a state.

    Args:
        value: the full tensor, this rank's elements of it [n], a tensor that is sharded in any way
            (every rank has to call this), or something that is not sharded, such as a number of
            steps.
        parameter: sharded or not.

    Raises:
        PlanError: ``value`` has neither the shape of the parameter nor that of its local shard.
    """
    if not isinstance(value, Tensor):
        return value
    is_scalar = value.dim() == 0 and parameter.dim() > 0  # such as the number of steps
    sharding = sharding_of(parameter)
    if sharding is None or is_scalar or sharding.describes(value):
        return value.detach().clone()
    if isinstance(value, TorchShardedTensor):
        value = part_of(value, sharding)
    elif sharding.tensor_parallel is not None and value.shape == parameter.shape:
        assert isinstance(parameter, DTensor)
        return as_parameter(value, parameter)
    else:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        value = sharding.own_part_of(value) if value.shape == parameter.shape else value
    local = local_of(parameter)
    if value.shape != local.shape:
        raise PlanError(
            f"{sharding.name}: expected a state of shape {tuple(parameter.shape)} or, on this "
            f"rank, {tuple(local.shape)}, got {tuple(value.shape)}"
        )
    copied = value.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
    return sharding.wrap(copied.reshape(-1))


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share ``model``; None for one rank, or if the model is not sharded."""
    mesh = mesh_of(model.parameters())
    return None if mesh is None else mesh.group


def _outline(states: Any) -> Any:
    """``states`` with meta tensors in the place of tensors that have dimensions."""
    if isinstance(states, Mapping):
        return {key: _outline(value) for key, value in states.items()}
    return states.to("meta") if isinstance(states, Tensor) and states.dim() else states


def _shard_all(outline: Any, states: Any, like: Any, source: dist.ProcessGroup | None) -> Any:
    if isinstance(outline, Mapping):
        own: Mapping[Any, Any] = states or {}  # empty on ranks that receive
        return {
            key: _shard_all(
                inner, own.get(key), like.get(key) if isinstance(like, Mapping) else like, source
            )
            for key, inner in outline.items()
        }
    if not isinstance(outline, Tensor):
        return outline
    full = outline
    if outline.is_meta:
        full = torch.empty_like(outline, device=like.device if isinstance(like, Tensor) else "cpu")
        if isinstance(states, Tensor):
            full.copy_(states)
        broadcast_tensors([full], source)
    return shard_like(full, like) if isinstance(like, Tensor) else full
