"""Which ranks share a model, and how: from a device mesh, or nothing at all, to one axis."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.plan.strategy import Strategy

__all__ = ["Axis", "resolve_mesh"]

_SHARDED_DIMS = 2  # (replicate, shard)


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that a model is sharded over, and this one among them.

    Ranks are numbered within ``group``. ``blocks[i][j]`` keeps shard j of replica i: the shards of
    a row make the whole model, and the ranks of a column hold the same.
    """

    size: int  # shards
    rank: int  # the shard that is here
    group: dist.ProcessGroup | None  # of all ranks; None where there is one only
    on_cpu: bool = False  # the user said so, by a mesh of CPUs
    blocks: tuple[tuple[int, ...], ...] = ()  # () is one replica, of all ranks

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        return self.blocks or (tuple(range(self.size)),)

    @property
    def num_ranks(self) -> int:
        return len(self.rows) * self.size

    @property
    def group_rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards make the model with this one's."""
        return next(row for row in self.rows if self.group_rank in row)

    @property
    def replica_ranks(self) -> tuple[int, ...]:
        """The ranks that hold what this one holds, itself included."""
        return tuple(row[self.rank] for row in self.rows)

    def is_same(self, other: "Axis") -> bool:
        """Whether both are the same ranks of the same group, in the same roles."""
        return self.group is other.group and (self.rows, self.rank) == (other.rows, other.rank)

    def backend(self, device_type: str) -> str | None:
        """What moves the bytes of tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
        if self.group is None:
            return None
        pairs = dist.get_backend_config(self.group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in pairs).get(device_type)


def resolve_mesh(mesh: DeviceMesh | None, strategy: Strategy) -> Axis:
    """The axis of ``mesh``; without one, all ranks, or this process alone if there are no others.

    Raises:
        PlanError: the mesh does not have the dimensions that ``strategy`` wants, or this rank is
            not in it.
    """
    wanted = _SHARDED_DIMS if strategy.replicas else 1
    if mesh is None and wanted > 1:
        raise PlanError(
            f"strategy {strategy.name!r} needs a mesh with two dimensions, replicas and shards, as "
            "in init_device_mesh(device, (2, 4), mesh_dim_names=('replicate', 'shard'))"
        )
    if mesh is None:
        if not dist.is_initialized():
            return Axis(size=1, rank=0, group=None)
        ranks, group = list(range(dist.get_world_size())), dist.group.WORLD
        return _axis([ranks], dist.get_rank(), group, strategy, on_cpu=False)
    if mesh.ndim != wanted:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}: strategy {strategy.name!r} "
            f"wants {wanted}; pass some of them, as in mesh['shard'], or another strategy"
        )
    if mesh.get_coordinate() is None:
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    rows = mesh.mesh.tolist() if wanted > 1 else [mesh.mesh.tolist()]
    group = _group_of(mesh)
    members = dist.get_process_group_ranks(group)
    numbered = [[members.index(rank) for rank in row] for row in rows]
    on_cpu = mesh.device_type == "cpu"
    return _axis(numbered, dist.get_rank(group), group, strategy, on_cpu=on_cpu)


def _axis(
    rows: list[list[int]],
    own: int,
    group: dist.ProcessGroup | None,
    strategy: Strategy,
    *,
    on_cpu: bool,
) -> Axis:
    if not strategy.shards:
        rows = [[rank] for row in rows for rank in row]
    blocks = tuple(tuple(row) for row in rows)
    if len(blocks) * len(blocks[0]) == 1:
        return Axis(size=1, rank=0, group=None, on_cpu=on_cpu)
    rank = next(row.index(own) for row in blocks if own in row)
    return Axis(len(blocks[0]), rank, group, on_cpu, blocks)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of all ranks of ``mesh``."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None
    if mesh.size() == dist.get_world_size():
        return world
    ranks = sorted(mesh.mesh.flatten().tolist())
    group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return group
