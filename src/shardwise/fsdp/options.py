"""Translate FSDP1's options to arguments of `shardwise.fully_shard`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from shardwise._private import mesh_without_groups
from shardwise._warnings import warn_caller
from shardwise.comm.device import is_accelerator, own_device
from shardwise.comm.groups import accelerator_type
from shardwise.errors import PlanError
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import resolve_strategy
from shardwise.tensor.mesh import DataParallelMesh, resolve_mesh

__all__ = [
    "FSDP1_STRATEGIES",
    "Ignored",
    "Ranks",
    "offload_policy",
    "precision_policy",
    "resolve_device",
    "resolve_ignored",
    "resolve_ranks",
]

Group = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None

# FSDP1's strategies: preset name and ``reshard_after_forward`` (None: all units but the root).
FSDP1_STRATEGIES: dict[ShardingStrategy, tuple[str, bool | None]] = {
    ShardingStrategy.FULL_SHARD: ("fsdp", None),
    ShardingStrategy.SHARD_GRAD_OP: ("fsdp", False),
    ShardingStrategy.NO_SHARD: ("ddp", None),
    ShardingStrategy.HYBRID_SHARD: ("hsdp", None),
    ShardingStrategy._HYBRID_SHARD_ZERO2: ("hsdp", False),
}


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model, and their sharding strategy."""

    mesh: DeviceMesh | None
    strategy: str
    reshard_after_forward: bool | None

    def data_parallel_mesh(self) -> DataParallelMesh:
        return resolve_mesh(self.mesh, resolve_strategy(self.strategy), self.sharding_factor)

    @property
    def sharding_factor(self) -> int | None:
        """1 for a single process without a mesh, otherwise None."""
        return 1 if self.strategy == "hsdp" and self.mesh is None else None

    @property
    def is_alone(self) -> bool:
        return all(group.size() == 1 for group in self.groups)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """FSDP1's ``process_group``: one group, or, if hybrid, those of shards and of replicas."""
        if dist.group.WORLD is None:
            return ()
        if self.mesh is not None:
            return tuple(self.mesh.get_group(dim) for dim in reversed(range(self.mesh.ndim)))
        return (dist.group.WORLD,)


def resolve_ranks(
    process_group: Group,
    device_mesh: DeviceMesh | None,
    strategy: ShardingStrategy,
    *,
    wraps_by_hand: bool,
) -> Ranks:
    """The mesh and the strategy for FSDP1's options, or a PlanError if they do not fit.

    ``wraps_by_hand``: a hybrid strategy needs a group or a mesh.
    """
    if process_group is not None and device_mesh is not None:
        raise PlanError("process_group and device_mesh: expected one of them, got both")
    name, reshard = FSDP1_STRATEGIES[strategy]
    if name != "hsdp":
        if isinstance(process_group, tuple):
            raise PlanError(f"process_group: {strategy.name} expects one group, got a pair")
        mesh = device_mesh if process_group is None else _mesh_of(process_group)
        return Ranks(_first_dim(mesh), name, reshard)
    if isinstance(process_group, tuple):
        return Ranks(_mesh_of_pair(*process_group), name, reshard)
    if process_group is not None:
        raise PlanError(
            f"Expected process_group to be passed in as a pair (shards, replicas) for "
            f"{strategy.name}, got one group; or pass device_mesh=init_device_mesh(device, "
            "(replicas, shards))"
        )
    if device_mesh is None and wraps_by_hand and dist.is_initialized():
        raise PlanError(
            f"{strategy.name} without auto_wrap_policy requires explicit specification of process "
            "group or device_mesh. All wrappers of a model share one"
        )
    return Ranks(device_mesh or _mesh_of_hosts(), name, reshard)


def precision_policy(mixed_precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    if mixed_precision is None:
        return MixedPrecisionPolicy(master_dtype="keep")
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        buffer_dtype=mixed_precision.buffer_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs,
        master_dtype="keep",
        full_precision=tuple(mixed_precision._module_classes_to_ignore),
        keep_low_precision_grads=mixed_precision.keep_low_precision_grads,
    )


def offload_policy(cpu_offload: CPUOffload | None) -> OffloadPolicy:
    """The policy for PyTorch's ``CPUOffload``, or for ours, which has one more field."""
    if cpu_offload is None:
        return NO_OFFLOAD
    offload_optimizer = getattr(cpu_offload, "offload_optimizer", False)
    if not (cpu_offload.offload_params or offload_optimizer):
        return NO_OFFLOAD
    return CPUOffloadPolicy(parameters=cpu_offload.offload_params)


def resolve_device(device_id: int | torch.device | None) -> torch.device | None:
    """The device for FSDP1's ``device_id``: an integer is the index of an accelerator.

    An accelerator without an index is this rank's.
    """
    if device_id is None:
        return None
    if not isinstance(device_id, int):
        given = torch.device(device_id)
        has_index = given != torch.device(given.type)
        if has_index or not is_accelerator(given):
            return given
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise PlanError(
            f"device_id={device_id}: this machine has no accelerator; pass torch.device('cpu')"
        )
    return torch.device(accelerator.type, device_id) if isinstance(device_id, int) else own_device()


@dataclass(frozen=True)
class Ignored:
    modules: set[nn.Module]
    parameters: set[nn.Parameter]


def resolve_ignored(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    wrapper: type[nn.Module],
) -> Ignored:
    """The modules and parameters that ``ignored_modules`` or ``ignored_states`` exclude.

    Modules inside excluded ones are included. Warns if all of ``root`` is excluded.
    """
    if modules is not None and states is not None:
        raise PlanError(
            "Cannot pass both ignored_modules and ignored_states at the same time; pass "
            "ignored_states"
        )
    outermost: list[Any] = list(modules or ())
    given: list[Any] = list(states or ())
    if not all(isinstance(each, nn.Module) for each in outermost):
        raise PlanError(
            "ignored_modules expects nn.Module list elements but got types "
            f"{_types_of(outermost)}; pass parameters as ignored_states"
        )
    if all(isinstance(each, nn.Module) for each in given):
        outermost += given
        given = []
    elif not all(isinstance(each, nn.Parameter) for each in given):
        raise PlanError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{_types_of(given)}; pass the parameters of the modules"
        )
    ignored = Ignored(
        modules={inner for module in outermost for inner in module.modules()},
        parameters=set(given).union(*(module.parameters() for module in outermost)),
    )
    for inner in ignored.modules:
        if isinstance(inner, wrapper):
            raise PlanError(
                "`ignored_modules` should not include FSDP modules, but it includes a wrapped "
                f"{type(inner.module).__name__}; pass the module before it is wrapped"
            )
    if root in ignored.modules:
        warn_caller(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored: {type(root).__name__}"
        )
    return ignored


def _types_of(values: Iterable[object]) -> list[type]:
    return sorted({type(value) for value in values}, key=repr)


def _mesh_of(group: Any) -> DeviceMesh:
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, _device_type(group))
    # An object that has only a size and this rank: the model can be built but not run.
    return mesh_without_groups("cpu", torch.arange(group.size(), device="cpu"), None, group.rank())


def _first_dim(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The dim that FSDP1 shards over; the others are for replicas or other parallelism."""
    if mesh is None or mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    return mesh[names[0]] if names else DeviceMesh.from_group(mesh.get_group(0), mesh.device_type)


def _mesh_of_pair(shards: dist.ProcessGroup, replicas: dist.ProcessGroup) -> DeviceMesh:
    """The mesh of a group of shards and one of replicas, whose ranks must form a grid."""
    own = dist.get_rank()
    row, column = (dist.get_process_group_ranks(group) for group in (shards, replicas))
    grid = [[rank + first - own for rank in row] for first in column]
    ranks = sorted(rank for line in grid for rank in line)
    if own not in row or own not in column or ranks != sorted(set(ranks)) or ranks[0] < 0:
        raise PlanError(
            f"process_group: shards {row} and replicas {column} do not form a mesh; pass "
            "device_mesh"
        )
    return DeviceMesh.from_group(
        [replicas, shards],
        _device_type(shards),
        mesh=torch.tensor(grid, device="cpu"),
        mesh_dim_names=("replicate", "shard"),
    )


def _device_type(group: dist.ProcessGroup) -> str:
    return accelerator_type(group) or "cpu"


def _mesh_of_hosts() -> DeviceMesh | None:
    """A mesh that shards within each host and replicates between hosts.

    A host has as many ranks as accelerators; without accelerators, it has all ranks.
    """
    world = dist.group.WORLD
    if world is None:
        return None
    num_ranks = world.size()
    per_host = math.gcd(num_ranks, torch.accelerator.device_count()) or num_ranks
    shape = num_ranks // per_host, per_host
    names = ("replicate", "shard")
    return init_device_mesh(_device_type(world), shape, mesh_dim_names=names)
