"""Shard tensors like parameters: tensors that every rank has, or that the first rank sends.

If the device mesh of FSDP1's sharded state dicts has more dims than data parallelism uses, every
tensor in them is on the mesh with both dims, and replicated over a dim that the parameter lacks.
There, the first dim cuts a tensor before the second. Tensor-parallel parameters are cut in the
opposite order, which `_StridedShard` expresses.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._private import is_strided_shard, pytree, root_mesh
from shardwise.errors import PlanError
from shardwise.fsdp.names import clean_name, clean_names
from shardwise.fsdp.sharded_tensors import TorchShardedTensor, part_of
from shardwise.tensor.sharding import local_of, mesh_of, sharding_of

__all__ = [
    "broadcast_object",
    "broadcast_states",
    "gather_objects",
    "group_of",
    "on_whole_mesh",
    "receive",
    "shard_like",
]


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
        pytree.tree_map_only(Tensor, lambda one: one.to("meta") if one.ndim else one, given), group
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


def _receive(
    placeholder: Any, own: Tensor | None, parameter: Tensor | None, group: dist.ProcessGroup | None
) -> Any:
    if not isinstance(placeholder, Tensor) or not placeholder.is_meta:
        return placeholder
    full = torch.empty_like(placeholder, device="cpu" if parameter is None else parameter.device)
    if own is not None:
        full.copy_(own)
    _broadcast_tensors([full], group)
    return full if parameter is None else shard_like(full, parameter)


# -- exchanges over the user's process groups; every rank of a group must call these -------------


def broadcast_states(states: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Copy the values of ``states`` from the first rank of ``group`` to all its ranks.

    Raises:
        PlanError: ranks differ in names, dtypes or shapes, so bytes would be taken for others.
    """
    own = [f"{clean_name(name)} ({t.dtype} {tuple(t.shape)})" for name, t in states.items()]
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, 1):
        if other != first:
            pairs = zip_longest(first, other, fillvalue="no tensor")
            sent, expected = next(pair for pair in pairs if pair[0] != pair[1])
            raise PlanError(
                f"sync_module_states: rank 0 sends {sent} where rank {rank} expects {expected}; "
                "build the same model on every rank, with the same dtypes and ties"
            )
    _broadcast_tensors(states.values(), group)


def _broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
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


# -- meshes of two dims ----------------------------------------------------------------------------


_NUM_DIMS = 2  # data and tensor parallelism; the job may have others, such as pipelines


def on_whole_mesh(tensor: DTensor) -> DTensor:
    """``tensor`` on the root of its mesh; every rank must call this."""
    mesh = root_mesh(tensor.device_mesh)
    if mesh.ndim != _NUM_DIMS or mesh.mesh_dim_names is None:
        return tensor
    placements = _placements_on(mesh, tensor)
    whole = _from_local(local_of(tensor), mesh, placements, tensor)
    in_order = [Shard(p.dim) if is_strided_shard(p) else p for p in placements]
    return whole.redistribute(placements=in_order)


def as_parameter(value: Tensor, parameter: DTensor) -> DTensor:
    """A copy of ``value``, whole or sharded in any way, distributed like ``parameter``.

    Every rank must call this.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(value, DTensor) and value.device_mesh == root_mesh(mesh):
        value = value.redistribute(placements=_placements_on(value.device_mesh, parameter))
        return _from_local(local_of(value).detach().clone(), mesh, placements, parameter)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    replicated = _from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, parameter)
    part = local_of(replicated.redistribute(placements=placements))
    return _from_local(part.clone(), mesh, placements, parameter)


def _placements_on(mesh: DeviceMesh, tensor: DTensor) -> list[Placement]:
    """The placements of ``tensor`` on ``mesh``, whose dims include those of the tensor's mesh."""
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, tensor.placements, strict=True))
    return [placements.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


def _from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: DTensor
) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
