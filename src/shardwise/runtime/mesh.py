"""Which ranks share a model, and how: from a device mesh, or nothing at all, to one axis."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.plan.strategy import Strategy
from shardwise.transport.health.status import Topology

__all__ = ["Axis", "resolve_mesh"]


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks that a model is sharded over, and this one among them.

    Ranks are numbered within ``group``. In ``blocks[i][j]``, i counts the replicas: the ranks of a
    row have the whole model between them, and those of a column hold the same, or, with
    ``is_two_level``, what would be the same is cut once more among them::

        blocks ((0, 1), (2, 3))      shard of rank   0  1  2  3
        is_two_level=False, size=2                   0  1  0  1
        is_two_level=True,  size=4                   0  2  1  3
    """

    size: int  # shards
    rank: int  # the shard that is here
    group: dist.ProcessGroup | None  # of all ranks; None where there is one only
    on_cpu: bool = False  # the user said so, by a mesh of CPUs
    blocks: tuple[tuple[int, ...], ...] = ()  # () is one replica, of all ranks
    is_two_level: bool = False
    mesh: DeviceMesh | None = None  # the user's, if there was one

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        return self.blocks or (tuple(range(self.size)),)

    @property
    def topology(self) -> Topology:
        return Topology(self.rows, self.is_two_level)

    @property
    def num_ranks(self) -> int:
        return len(self.rows) * len(self.rows[0])

    @property
    def group_rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def row(self) -> tuple[int, ...]:
        """The ranks of this one's replica."""
        return next(row for row in self.rows if self.group_rank in row)

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks that stand at the same place in the other replicas, and this one."""
        place = self.row.index(self.group_rank)
        return tuple(row[place] for row in self.rows)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks whose shards make the model with this one's, by shard."""
        return _by_shard(self.rows) if self.is_two_level else self.row

    def is_same(self, other: "Axis") -> bool:
        """Whether both are the same ranks of the same group, in the same roles."""
        roles = [(axis.rows, axis.rank, axis.is_two_level) for axis in (self, other)]
        return self.group is other.group and roles[0] == roles[1]

    def backend(self, device_type: str) -> str | None:
        """What moves the bytes of tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
        if self.group is None:
            return None
        pairs = dist.get_backend_config(self.group).split(",")  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in pairs).get(device_type)


def resolve_mesh(
    mesh: DeviceMesh | None, strategy: Strategy, sharding_factor: int | None = None
) -> Axis:
    """The axis of ``mesh``; without one, all ranks, or this process alone if there are no others.

    Raises:
        PlanError: the mesh does not have the dimensions that ``strategy`` wants, or this rank is
            not in it; ``sharding_factor`` does not fit.
    """
    if mesh is None:
        return _without_mesh(strategy, sharding_factor)
    if sharding_factor is not None:
        raise PlanError("the mesh says it already; pass either mesh or sharding_factor")
    if mesh.ndim != strategy.num_axes:
        raise PlanError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}: {strategy} wants "
            f"{strategy.num_axes}; pass some of them, as in mesh['shard'], or another strategy"
        )
    if mesh.get_coordinate() is None:
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    rows = mesh.mesh.tolist() if mesh.ndim > 1 else [mesh.mesh.tolist()]
    group = _group_of(mesh)
    members = dist.get_process_group_ranks(group)
    numbered = [[members.index(rank) for rank in row] for row in rows]
    return _axis(numbered, group, strategy, on_cpu=mesh.device_type == "cpu", mesh=mesh)


def _without_mesh(strategy: Strategy, sharding_factor: int | None) -> Axis:
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if strategy.num_axes == 1 and sharding_factor not in (None, num_ranks):
        raise PlanError(
            f"sharding_factor={sharding_factor}: {strategy} shards over all {num_ranks} ranks; "
            "use strategy 'hsdp', which repeats the model over groups of that many"
        )
    if strategy.num_axes > 1 and sharding_factor is None:
        raise PlanError(
            f"{strategy} needs a mesh with two dimensions, replicas and shards, as in "
            "init_device_mesh(device, (2, 4), mesh_dim_names=('replicate', 'shard')), or "
            "sharding_factor=4"
        )
    factor = num_ranks if sharding_factor is None else sharding_factor
    if factor < 1 or num_ranks % factor:
        fitting = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        raise PlanError(f"sharding_factor={factor}: expected one that divides the ranks: {fitting}")
    rows = [list(range(i, i + factor)) for i in range(0, num_ranks, factor)]
    return _axis(rows, dist.group.WORLD if num_ranks > 1 else None, strategy, on_cpu=False)


def _axis(
    rows: list[list[int]],
    group: dist.ProcessGroup | None,
    strategy: Strategy,
    *,
    on_cpu: bool,
    mesh: DeviceMesh | None = None,
) -> Axis:
    ranks = [rank for row in rows for rank in row]
    if len(ranks) == 1:
        return Axis(size=1, rank=0, group=None, on_cpu=on_cpu, mesh=mesh)
    if not strategy.shards:
        rows = [[rank] for rank in ranks]
    elif strategy.is_flat:
        rows = [ranks]
    blocks = tuple(tuple(row) for row in rows)
    is_two_level = strategy.is_two_level and len(blocks) > 1
    own = dist.get_rank(group)
    shards = _by_shard(blocks) if is_two_level else next(row for row in blocks if own in row)
    return Axis(len(shards), shards.index(own), group, on_cpu, blocks, is_two_level, mesh)


def _by_shard(rows: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Column by column: those of a column have neighbouring shards, which make one of a row."""
    return tuple(row[place] for place in range(len(rows[0])) for row in rows)


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
