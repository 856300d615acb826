"""torch's `ShardedTensor`, which FSDP1's sharded and local state dicts contain.

With a device mesh, FSDP1's state dicts contain DTensors instead.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._private import ShardMetadata, TorchShardedTensor, new_sharded_tensor
from shardwise.comm.groups import backend_of, rank_device
from shardwise.errors import PlanError
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import Sharding

__all__ = ["TorchShardedTensor", "in_chunks", "part_of", "shard_group"]


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
    _join_parts(whole, group)
    return sharding.own_part_of(whole.view(sharding.shape))


def _join_parts(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum ``tensor`` over ``group``, whose ranks each have some elements and zeros for the others.

    The bytes are summed, so every value is kept exactly, including negative zeros and NaNs.
    """
    if group is not None and dist.get_backend(group) != "fake":
        dist.all_reduce(tensor.view(-1).view(torch.uint8), group=group)


def _rank_of(shard: ShardMetadata) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    return -1 if rank is None else rank


def _location(rank: int, device: torch.device) -> str:
    """The location of the shard of ``rank``, in the notation of `ShardMetadata`."""
    if device.type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device.type}:{rank % torch.accelerator.device_count()}"
