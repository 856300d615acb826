"""Shard tensors like parameters: tensors that every rank has, or that the first rank sends."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._private import pytree
from shardwise.errors import PlanError
from shardwise.fsdp.collectives import broadcast_object, broadcast_tensors
from shardwise.fsdp.names import clean_names
from shardwise.fsdp.sharded_tensors import TorchShardedTensor, part_of
from shardwise.fsdp.whole_mesh import as_parameter
from shardwise.tensor.sharding import local_of, mesh_of, sharding_of

__all__ = ["group_of", "receive", "shard_like"]


def shard_like(value: Any, parameter: Tensor) -> Any:
    """A copy of ``value``, a state of ``parameter``, sharded like the parameter.

    ``value`` is the full tensor, this rank's elements of it [n], a tensor that is sharded in any
    way (every rank must then call this), or something else, such as a number of steps.
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
    """The ranks that share ``model``; None for a single rank, or if the model is not sharded."""
    mesh = mesh_of(model.parameters())
    return None if mesh is None else mesh.group


def receive(states: Mapping[str, Any] | None, model: nn.Module) -> dict[str, Any]:
    """Receive the optimizer states of ``model``, by name, from the first of its ranks.

    States are sent and sharded one by one, so the other ranks hold only one full tensor at a time.
    """
    given = states or {"state": {}, "param_groups": []}
    group = group_of(model)
    received: dict[str, Any] = broadcast_object(
        pytree.tree_map_only(Tensor, _placeholder, given), group
    )
    parameters = clean_names(model)
    received["state"] = {
        name: {
            key: _receive(value, given["state"].get(name, {}).get(key), parameters.get(name), group)
            for key, value in entries.items()
        }
        for name, entries in received["state"].items()
    }
    return received


def _placeholder(value: Tensor) -> Tensor:
    return value.to("meta") if value.ndim else value


def _receive(
    placeholder: Any, own: Tensor | None, parameter: Tensor | None, group: dist.ProcessGroup | None
) -> Any:
    if not isinstance(placeholder, Tensor) or not placeholder.is_meta:
        return placeholder
    full = torch.empty_like(placeholder, device="cpu" if parameter is None else parameter.device)
    if own is not None:
        full.copy_(own)
    broadcast_tensors([full], group)
    return full if parameter is None else shard_like(full, parameter)
