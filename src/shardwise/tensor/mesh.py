"""The groups of ranks that share a model, derived from a device mesh or from the job itself."""

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise._private import flat_mesh, joined_mesh, mesh_without_groups
from shardwise.comm.api import Operation, RankGroup, Stage, Work
from shardwise.comm.groups import accelerator_type, backend_of, new_group, rank_device
from shardwise.errors import PlanError
from shardwise.plan.axes import AxisBytes
from shardwise.plan.spelling import divisors
from shardwise.plan.strategy import STRATEGIES, Strategy

__all__ = [
    "Communicators",
    "DataParallelMesh",
    "all_ranks_of",
    "data_parallel_part",
    "resolve_mesh",
    "without_copies",
]

# Variables that torchrun, SLURM's srun, Open MPI and MPICH set to the number of processes.
_NUM_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
Communicators = Literal["separate", "shared"]
_GroupsByRanks = dict[tuple[int, ...], dist.ProcessGroup]
# The groups created for meshes that have no process group of all their ranks.
_groups_of_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupsByRanks]" = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, eq=False)
class DataParallelMesh:
    """The ranks that a model is sharded over, and the role of each group of them.

    The ranks of a row together hold the whole model. The ranks of a column hold the same part of
    it or, with two levels of sharding, divide that part again::

        rows [[0, 1], [2, 3]]        shard of rank   0  1  2  3
        one level, size=2                            0  1  0  1
        two levels, size=4                           0  2  1  3
    """

    world: RankGroup  # all ranks
    row: RankGroup  # the ranks of this rank's row
    column: RankGroup  # the ranks at the same position in all rows
    shards: RankGroup  # the ranks whose shards form one replica of the model, in order of shards
    replicas: tuple[tuple[int, ...], ...]  # the ranks of every replica, in order of shards
    on_cpu: bool = False  # the user passed a mesh of CPUs
    mesh: DeviceMesh | None = None  # the user's mesh, if there is one
    dims: tuple[str, ...] = ()  # the dims of the parameters' mesh that these ranks cover
    leaves: int | None = None  # micro-batches of a step, over all ranks, of a reproducible model
    _meshes: dict[tuple[str, bool], DeviceMesh] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        groups = self.world, self.row, self.column, self.shards, self.replicas
        return DataParallelMesh, (*groups, self.on_cpu, self.mesh, self.dims, self.leaves)

    def device_mesh(self, device_type: str, *, has_groups: bool = False) -> DeviceMesh:
        """The user's mesh, or one of all ranks; ``has_groups`` lets torch run collectives on it."""
        if self.mesh is not None:
            return self.mesh
        if device_type == "meta":  # use the device where the parameters will be
            device_type = accelerator_type(self.group) or "cpu"
        key = device_type, has_groups
        if key not in self._meshes:
            self._meshes[key] = self._new_mesh(device_type, has_groups=has_groups)
        return self._meshes[key]

    def _new_mesh(self, device_type: str, *, has_groups: bool) -> DeviceMesh:
        if self.group is None:
            # torch runs collectives even to distribute tensors over a mesh of one rank.
            if has_groups and (alone := dist.group.WORLD) is not None:
                return DeviceMesh.from_group(alone, device_type)
            return mesh_without_groups(device_type, torch.tensor([0], device="cpu"), None, 0)
        if self.row.size in (1, self.num_ranks):
            return DeviceMesh.from_group(self.group, device_type)
        members = torch.tensor(dist.get_process_group_ranks(self.group), device="cpu")
        rows = members[list(self.world.ranks)].view(-1, self.row.size)
        names = ("replicate", "shard")
        if has_groups:
            return DeviceMesh(device_type, rows, mesh_dim_names=names)
        return mesh_without_groups(device_type, rows, names, dist.get_rank())

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of all ranks; None if there is only one rank."""
        return self.world.parent

    @property
    def size(self) -> int:
        """The number of shards."""
        return self.shards.size

    @property
    def rank(self) -> int:
        """The number of this rank's shard."""
        return self.shards.index

    @property
    def num_ranks(self) -> int:
        return self.world.size

    @property
    def group_rank(self) -> int:
        """This rank's number in the process group."""
        return self.world.own_rank

    @property
    def is_two_level(self) -> bool:
        """Whether parameters are cut over the column as well as over the row."""
        return self.size > self.row.size

    @cached_property
    def reduction(self) -> tuple[Stage, ...]:
        """The stages that sum gradients over all ranks: over the row, then over the column."""
        over_row = Stage(Operation.REDUCE_SCATTER, self.row)
        if self.column.size == 1:
            return (over_row,)
        in_column = Operation.REDUCE_SCATTER if self.is_two_level else Operation.ALL_REDUCE
        return over_row, Stage(in_column, self.column)

    @cached_property
    def in_order(self) -> RankGroup:
        """All ranks row by row, in the order in which they divide the leaves of a step."""
        ranks = [rank for replica in self.replicas for rank in replica]
        if self.is_two_level:  # column by column
            size = self.column.size
            ranks = [rank for first in range(size) for rank in ranks[first::size]]
        return self.world.select(*ranks)

    @property
    def own_leaves(self) -> range:
        """The leaves of a step that this rank runs; none unless the model is reproducible."""
        size = (self.leaves or 0) // self.num_ranks
        return range(self.in_order.index * size, (self.in_order.index + 1) * size)

    @property
    def num_addends(self) -> int:
        """The number of gradients in a sum over all ranks, of which each is the mean of a batch."""
        return self.leaves or self.num_ranks

    def axis_bytes(self, works: Iterable[Work], inner_ranks: int = 1) -> AxisBytes:
        """The bytes that this rank sends in ``works``, collectives of these ranks.

        A subgroup of the row has ``inner_ranks`` neighboring ranks.
        """
        in_row = elsewhere = in_subgroup = 0
        row, subgroup = frozenset(self.row.ranks), frozenset(self.subgroup(inner_ranks).ranks)
        for ranks, num_bytes in (sent for work in works for sent in work.sent):
            near = len(row.intersection(ranks))
            in_row += (near - 1) * num_bytes
            elsewhere += (len(ranks) - near) * num_bytes
            in_subgroup += (len(subgroup.intersection(ranks)) - 1) * num_bytes
        return AxisBytes(in_row, elsewhere, subgroup=in_subgroup)

    def subgroup(self, size: int) -> RankGroup:
        """The group of ``size`` neighboring ranks in the row that contains this rank."""
        first = self.row.index // size * size
        return self.row.select(*self.row.ranks[first : first + size])

    def within(self, outer: "DataParallelMesh") -> "DataParallelMesh":
        """The same ranks as subgroups of ``outer``, which then orders all of their collectives."""
        members = outer.global_ranks

        def part(group: RankGroup) -> RankGroup:
            own = self.global_ranks
            return outer.world.select(*(members.index(own[rank]) for rank in group.ranks))

        row, column, shards = map(part, (self.row, self.column, self.shards))
        return replace(
            self,
            world=outer.world,
            row=row,
            column=column,
            shards=shards,
            replicas=tuple(part(self.world.select(*ranks)).ranks for ranks in self.replicas),
        )

    @property
    def global_ranks(self) -> list[int]:
        """The process group's members as ranks of the job, in the order of the group."""
        if self.group is None:
            return [dist.get_rank() if dist.is_initialized() else 0]
        return dist.get_process_group_ranks(self.group)

    def with_options(
        self, dims: tuple[str, ...], queues: Communicators, leaves: int | None
    ) -> "DataParallelMesh":
        """The same ranks with these options, which gather and reduce in one queue if "shared"."""
        world = replace(self.world, has_one_queue=queues == "shared")
        return replace(self, dims=dims, world=world, leaves=leaves)

    def with_one_shard_per_rank(self) -> "DataParallelMesh":
        """The same ranks with one shard per rank, in order of rank."""
        alone, replicas = self.world.select(self.world.own_rank), (self.world.ranks,)
        flat = replace(self, row=self.world, column=alone, shards=self.world, replicas=replicas)
        return replace(flat, mesh=None, _meshes={})

    @property
    def key(self) -> tuple[Any, ...]:
        """All that a call of `fully_shard` has given this mesh."""
        groups = self.world, self.row, self.column, self.shards
        return *groups, self.on_cpu, self.mesh, self.dims, self.leaves

    def has_same_shards(self, other: "DataParallelMesh") -> bool:
        """Whether the same ranks hold the same shards in both, and both are of the same shard."""
        one, two = ((mesh.group, mesh.replicas, mesh.rank) for mesh in (self, other))
        return one == two

    def on_this_rank(self) -> "DataParallelMesh":
        """The mesh of this rank, if this one is of another rank that holds the same shard."""
        own = self.group_rank if self.group is None else dist.get_rank(self.group)
        replica = next((ranks for ranks in self.replicas if own in ranks), ())
        if own == self.group_rank or not replica or replica.index(own) != self.rank:
            return self
        world, column = (replace(group, own_rank=own) for group in (self.world, self.column))
        row = world.select(*replica)  # no two ranks hold the same shard if there are two levels
        return replace(self, world=world, row=row, column=column, shards=row, _meshes={})

    @property
    def accelerator(self) -> torch.device | None:
        """This rank's accelerator; None if the ranks exchange CPU tensors."""
        group = dist.group.WORLD if self.group is None else self.group  # None if it is alone
        if self.on_cpu or accelerator_type(group) is None:
            return None
        return rank_device(group)

    def backend(self, device_type: str) -> str | None:
        """The backend for tensors on ``device_type``: "gloo", "nccl", "fake" or None."""
        return backend_of(self.group, device_type)


def without_copies(meshes: Mapping[str, DataParallelMesh]) -> dict[str, DataParallelMesh]:
    """Replace all of ``meshes`` that are equal, as those of calls in a loop are, by one object."""
    found: dict[tuple[Any, ...], DataParallelMesh] = {}
    for mesh in meshes.values():
        found.setdefault(mesh.key, mesh)
    return {name: found[mesh.key] for name, mesh in meshes.items()}


def resolve_mesh(
    mesh: DeviceMesh | None, strategy: Strategy, sharding_factor: int | None = None
) -> DataParallelMesh:
    """The groups of ``mesh``; for None, those of all ranks, or of this process alone.

    Raises:
        PlanError: the mesh does not have the dimensions that ``strategy`` requires, or this rank
            is not in it, or ``sharding_factor`` does not fit.
    """
    if mesh is None:
        return _without_mesh(strategy, sharding_factor)
    if sharding_factor is not None:
        raise PlanError(
            f"sharding_factor={sharding_factor} with a mesh, whose shape already gives the factor; "
            "pass either mesh or sharding_factor"
        )
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"mesh={mesh!r}: expected a DeviceMesh, as from init_device_mesh('cuda', (8,)); None "
            "takes all ranks, and sharding_factor divides them for 'hsdp'"
        )
    if mesh.ndim != strategy.num_axes:
        raise PlanError(
            f"fully_shard expects a {'1D or 2D' if mesh.ndim > 2 else f'{strategy.num_axes}D'} "  # noqa: PLR2004
            f"DeviceMesh but got {mesh}, and {strategy}; pass some of its dimensions, as in "
            "mesh['shard'], or another strategy"
        )
    if mesh.get_coordinate() is None:
        raise PlanError(f"rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}")
    rows = mesh.mesh.tolist() if mesh.ndim > 1 else [mesh.mesh.tolist()]
    # Without a process group, the mesh only describes how a model would be sharded.
    group = _group_of(mesh) if dist.is_initialized() else None
    members = list(range(mesh.size())) if group is None else dist.get_process_group_ranks(group)
    numbered = [[members.index(rank) for rank in row] for row in rows]
    return _groups(numbered, group, strategy, mesh)


def data_parallel_part(
    mesh: DeviceMesh | None, shard: Sequence[str], replicate: Sequence[str]
) -> DeviceMesh:
    """The mesh of the dims ``replicate`` and ``shard`` of ``mesh``, each flattened into one dim.

    Raises:
        PlanError: ``mesh`` lacks one of these dims.
    """
    names = (mesh and mesh.mesh_dim_names) or ()
    unknown = [name for name in (*shard, *replicate) if name not in names]
    if mesh is None or unknown:
        raise PlanError(
            f"dp_mesh_dims: {', '.join(unknown)} not found in mesh.mesh_dim_names {names}; pass "
            "the mesh of the parameters, and names of its dims"
        )
    parts = [flat_mesh(mesh, dims) for dims in (replicate, shard) if dims]
    return parts[0] if len(parts) == 1 else joined_mesh(*parts)


def all_ranks_of(mesh: DeviceMesh) -> DataParallelMesh:
    """The ranks of a ``mesh`` with any number of dims; each rank holds a replica."""
    rows = [[index] for index in range(mesh.size())]
    return _groups(rows, _group_of(mesh), STRATEGIES["ddp"], mesh)


def _without_mesh(strategy: Strategy, sharding_factor: int | None) -> DataParallelMesh:
    if not dist.is_initialized():
        _join_launched_ranks()
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if strategy.num_axes == 1 and sharding_factor not in (None, num_ranks):
        raise PlanError(
            f"sharding_factor={sharding_factor}: {strategy} shards over all {num_ranks} ranks; "
            "use strategy 'hsdp', which replicates the model on each group of that many ranks"
        )
    if strategy.num_axes > 1 and sharding_factor is None:
        raise PlanError(
            f"{strategy} needs a mesh with two dimensions, replicas and shards, as in "
            "init_device_mesh(device, (2, 4), mesh_dim_names=('replicate', 'shard')), or "
            "sharding_factor=4"
        )
    factor = num_ranks if sharding_factor is None else sharding_factor
    if not isinstance(factor, SupportsIndex) or factor < 1 or num_ranks % factor:
        raise PlanError(
            f"sharding_factor={factor!r}: expected a divisor of {num_ranks}: {divisors(num_ranks)}"
        )
    rows = [list(range(i, i + factor)) for i in range(0, num_ranks, factor)]
    return _groups(rows, dist.group.WORLD if num_ranks > 1 else None, strategy)


def _join_launched_ranks() -> None:
    """Initialize the process group under torchrun, as torch's fully_shard does.

    A single rank needs it only on an accelerator, which the backend of the group tells it to use.

    Raises:
        PlanError: another launcher started several processes, which would not be connected.
    """
    several = [name for name in _NUM_PROCESSES if os.environ.get(name, "1") not in ("", "0", "1")]
    is_launched = {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    is_single = is_launched and os.environ.get("WORLD_SIZE") == "1"
    if "WORLD_SIZE" in several and "RANK" in os.environ:
        dist.init_process_group()
    elif several:
        raise PlanError(
            f"{several[0]}={os.environ[several[0]]}: a launcher started several processes, and "
            "without a process group each would train a separate model; start them with "
            "torchrun, or call torch.distributed.init_process_group before fully_shard"
        )
    elif is_single and torch.accelerator.is_available():
        dist.init_process_group()


def _groups(
    rows: list[list[int]],
    group: dist.ProcessGroup | None,
    strategy: Strategy,
    mesh: DeviceMesh | None = None,
) -> DataParallelMesh:
    on_cpu = mesh is not None and mesh.device_type == "cpu"
    ranks = [rank for row in rows for rank in row]
    if len(ranks) == 1:
        alone = RankGroup((0,), 0)
        return DataParallelMesh(alone, alone, alone, alone, ((0,),), on_cpu, mesh)
    if not strategy.shards:
        rows = [[rank] for rank in ranks]
    elif strategy.is_flat:
        rows = [ranks]
    if group is not None or mesh is None:
        own = dist.get_rank(group)
    else:
        own = int(mesh.mesh[tuple(mesh.get_coordinate() or ())])
    world = RankGroup(tuple(range(len(ranks))), own, group)
    row = next(world.select(*row) for row in rows if own in row)
    columns = list(zip(*rows, strict=True))
    column = world.select(*columns[row.index])
    # Column by column: the ranks of a column divide one part of a row into neighboring shards.
    by_column = [rank for column in columns for rank in column]
    replicas = [by_column] if strategy.is_two_level else rows
    shards = world.select(*next(ranks for ranks in replicas if own in ranks))
    numbered = tuple(map(tuple, replicas))
    return DataParallelMesh(world, row, column, shards, numbered, on_cpu, mesh)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of ``mesh``, created if there is none."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    assert world is not None
    if mesh.size() == dist.get_world_size():
        return world
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    groups = _groups_of_meshes.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = new_group(RankGroup(ranks, dist.get_rank(), world), None, "shardwise/mesh")
    return groups[ranks]
