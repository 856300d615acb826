"""Which ranks share a model: from a device mesh, or nothing at all, to one axis."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError

__all__ = ["Axis", "resolve_mesh"]


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that a model is sharded over, and this one among them."""

    size: int
    rank: int
    group: dist.ProcessGroup | None  # None where there is one rank only
    on_cpu: bool = False  # the user said so, by a mesh of CPUs

    def is_same(self, other: "Axis") -> bool:
        """Whether both are the same ranks of the same group."""
        return self.group is other.group and (self.size, self.rank) == (other.size, other.rank)

    def backend(self, device_type: str) -> str | None:
        """What moves the bytes of tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
        if self.group is None:
            return None
        pairs = dist.get_backend_config(self.group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in pairs).get(device_type)


def resolve_mesh(mesh: DeviceMesh | None) -> Axis:
    """The axis of ``mesh``; without one, all ranks, or this process alone if there are no others.

    Raises:
        PlanError: the mesh has more than one dimension, or this rank is not in it.
    """
    if mesh is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Axis(size=1, rank=0, group=None)
        return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    if mesh.ndim != 1:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}: strategy 'fsdp' shards over "
            "one; pass that dimension, as in mesh['shard']"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    if mesh.size() == 1:
        return Axis(size=1, rank=0, group=None)
    return Axis(mesh.size(), coordinate[0], mesh.get_group(), on_cpu=mesh.device_type == "cpu")
