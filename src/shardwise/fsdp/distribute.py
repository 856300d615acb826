"""Shard tensors like parameters: tensors that every rank has, or that the first rank sends.

FSDP1's sharded and local state dicts contain torch's `ShardedTensor` or, with a device mesh,
DTensors. If the mesh has more dims than data parallelism uses, every tensor in a state dict is on
the mesh with both dims, and replicated over a dim that the parameter lacks. There, the first dim
cuts a tensor before the second. Tensor-parallel parameters are cut in the opposite order, which
`_StridedShard` expresses.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._private import (
    ShardMetadata,
    TorchShardedTensor,
    is_strided_shard,
    new_sharded_tensor,
    pytree,
    root_mesh,
)
from shardwise.comm.groups import backend_of, rank_device
from shardwise.errors import PlanError
from shardwise.fsdp.names import clean_names
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import Sharding, local_of, mesh_of, sharding_of

__all__ = [
    "TorchShardedTensor",
    "broadcast_object",
    "broadcast_tensors",
    "gather_objects",
    "group_of",
    "in_chunks",
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
    broadcast_tensors([full], group)
    return full if parameter is None else shard_like(full, parameter)


# -- exchanges over the user's process groups; every rank of a group must call these -------------


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


# -- sharded tensors of torch ----------------------------------------------------------------------


def shard_group(mesh: DataParallelMesh) -> dist.ProcessGroup | None:
    """The ranks that together hold the shards of a model; all ranks if it is replicated.

    None for a single process.
    """
    if mesh.group is None or mesh.size in (1, mesh.num_ranks):
        return mesh.group
    return mesh.device_mesh("cpu", has_groups=True).get_group(-1)


def in_chunks(value: ShardedTensor, *, flattened: bool, to_cpu: bool = False) -> Tensor:
    """``value`` as a torch `ShardedTensor` with a chunk of the first dim on each rank.

    The chunks are those of `torch.chunk`, which torch's functions for `ShardedTensor`s expect, so
    ``value`` is gathered first. Scalars and tensors of a single process are returned whole.
    """
    whole, group = value.full_tensor(), shard_group(value.sharding.mesh)
    whole = whole.view(-1) if flattened else whole
    if group is None or not whole.numel() or not whole.ndim:
        return whole.cpu() if to_cpu else whole
    chunks, rank = whole.chunk(group.size()), group.rank()  # the last ranks may have no chunk
    local = chunks[rank].clone() if rank < len(chunks) else whole[:0]
    local = local.cpu() if to_cpu else local
    owners = dist.get_process_group_ranks(group)[: len(chunks)]
    starts, zeros = accumulate(map(len, chunks[:-1]), initial=0), [0] * (whole.ndim - 1)
    shards = [
        ShardMetadata([start, *zeros], list(chunk.shape), _location(owner, local.device))
        for owner, start, chunk in zip(owners, starts, chunks, strict=True)
    ]
    own = shards[rank] if rank < len(shards) else None
    return new_sharded_tensor(local, own, shards, whole.shape, group)


def part_of(value: TorchShardedTensor, sharding: Sharding) -> Tensor:
    """This rank's part of ``value`` under ``sharding``.

    Every rank must call this, because it gathers ``value``.
    """
    group, metadata = shard_group(sharding.mesh), value.metadata()
    if metadata.size.numel() != sharding.shape.numel():
        raise PlanError(
            f"{sharding.name}: expected a ShardedTensor of {tuple(sharding.shape)}, got one of "
            f"{tuple(metadata.size)}"
        )
    members = {0} if group is None else set(dist.get_process_group_ranks(group))
    holders = {_rank_of(shard) for shard in metadata.shards_metadata}
    if not holders <= members:
        raise PlanError(
            f"{sharding.name}: expected a ShardedTensor of ranks {sorted(members)}, got one of "
            f"ranks {sorted(holders)}; load it with torch.distributed.checkpoint, or load a full "
            "state dict"
        )
    on_cpu = group is None or backend_of(group, "cpu") is not None
    device = torch.device("cpu") if on_cpu else rank_device(group)
    whole = torch.zeros(metadata.size, dtype=metadata.tensor_properties.dtype, device=device)
    for shard in value.local_shards():
        box = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        whole[tuple(slice(start, start + size) for start, size in box)].copy_(shard.tensor)
    join_parts(whole, group)
    return sharding.own_part_of(whole.view(sharding.shape))


def _rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    return -1 if rank is None else rank


def _location(rank: int, device: torch.device) -> str:
    """The location of the shard of ``rank``, in the notation of `ShardMetadata`."""
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device.type}:{rank % torch.accelerator.device_count()}"


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
