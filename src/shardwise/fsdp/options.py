"""FSDP1's options in the engine's words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.fsdp.api import MixedPrecision, ShardingStrategy, TorchCPUOffload
from shardwise.plan.offload import NO_OFFLOAD, CPUOffloadPolicy, OffloadPolicy
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.plan.strategy import resolve_strategy
from shardwise.runtime.mesh import DataParallelMesh, resolve_mesh

__all__ = ["Ignored", "Ranks", "offload_policy", "precision_policy", "ranks_of", "resolve_device"]

Group = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None


@dataclass(frozen=True)
class Ranks:
    """Which ranks share the model, and how."""

    mesh: DeviceMesh | None
    strategy: str
    reshard_after_forward: bool | None  # None: all but the root
    sharding_factor: int | None = None

    def axis(self) -> DataParallelMesh:
        """As the engine will see them."""
        return resolve_mesh(self.mesh, resolve_strategy(self.strategy), self.sharding_factor)


def ranks_of(
    process_group: Group, device_mesh: DeviceMesh | None, strategy: ShardingStrategy
) -> Ranks:
    """The engine's row and mesh for a strategy of FSDP1.

    Raises:
        PlanError: both a group and a mesh, or a number of them that the strategy does not want.
    """
    if process_group is not None and device_mesh is not None:
        raise PlanError("process_group and device_mesh: pass one of them")
    stays = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
    reshard = False if stays else None
    is_hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    if not is_hybrid:
        if isinstance(process_group, tuple):
            raise PlanError(f"process_group: {strategy.name} takes one group, got a pair")
        mesh = device_mesh if process_group is None else _mesh_of(process_group)
        row = "ddp" if strategy is ShardingStrategy.NO_SHARD else "fsdp"
        return Ranks(mesh, row, reshard)
    if device_mesh is not None:
        return Ranks(device_mesh, "hsdp", reshard)
    if isinstance(process_group, tuple):
        return Ranks(_mesh_of_pair(*process_group), "hsdp", reshard)
    if process_group is not None:
        raise PlanError(
            f"process_group: {strategy.name} takes a pair of groups (shards, replicas), or "
            "device_mesh=init_device_mesh(device, (replicas, shards))"
        )
    return Ranks(None, "hsdp", reshard, sharding_factor=_ranks_of_a_machine())


def precision_policy(mixed_precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """Raises PlanError for what cannot be honoured."""
    if mixed_precision is None:
        return MixedPrecisionPolicy(master_dtype="keep")
    if mixed_precision.keep_low_precision_grads:
        raise PlanError(
            "keep_low_precision_grads=True: gradients have the dtype of the parameters here; for "
            "16-bit ones, convert the model (model.bfloat16()) before wrapping it"
        )
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        buffer_dtype=mixed_precision.buffer_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs,
        master_dtype="keep",
        full_precision=tuple(mixed_precision._module_classes_to_ignore),
    )


def offload_policy(cpu_offload: TorchCPUOffload | None) -> OffloadPolicy:
    """The engine's policy for PyTorch's ``CPUOffload``, or ours, which has one more field."""
    if cpu_offload is None:
        return NO_OFFLOAD
    offload_optimizer = getattr(cpu_offload, "offload_optimizer", False)
    if not (cpu_offload.offload_params or offload_optimizer):
        return NO_OFFLOAD
    return CPUOffloadPolicy(parameters=cpu_offload.offload_params)


def resolve_device(device_id: int | torch.device | None) -> torch.device | None:
    """A number is that of an accelerator."""
    if not isinstance(device_id, int):
        return device_id
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        raise PlanError(
            f"device_id={device_id}: this machine has no accelerator; pass torch.device('cpu')"
        )
    return torch.device(accelerator.type, device_id)


class Ignored:
    """Modules and parameters that are left alone.

    Raises:
        PlanError: both ``ignored_modules`` and ``ignored_states``.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] | None,
        states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    ) -> None:
        if modules is not None and states is not None:
            raise PlanError("ignored_modules and ignored_states: pass ignored_states alone")
        given = [*(modules or ()), *(states or ())]
        tops = [one for one in given if isinstance(one, nn.Module)]
        self.modules = {inner for module in tops for inner in module.modules()}
        self.parameters = {one for one in given if isinstance(one, nn.Parameter)}
        for module in tops:
            self.parameters.update(module.parameters())


def _mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, _device_type(group))


def _mesh_of_pair(shards: dist.ProcessGroup, replicas: dist.ProcessGroup) -> DeviceMesh:
    """A mesh of a group of shards and one of replicas, whose ranks lie at equal distances."""
    own = dist.get_rank()
    row, column = (dist.get_process_group_ranks(group) for group in (shards, replicas))
    grid = [[rank + first - own for rank in row] for first in column]
    ranks = sorted(rank for line in grid for rank in line)
    if own not in row or own not in column or ranks != sorted(set(ranks)) or ranks[0] < 0:
        raise PlanError(
            f"process_group: shards {row} and replicas {column} make no mesh; pass device_mesh"
        )
    return DeviceMesh.from_group(
        [replicas, shards],
        _device_type(shards),
        mesh=torch.tensor(grid),
        mesh_dim_names=("replicate", "shard"),
    )


def _device_type(group: dist.ProcessGroup) -> str:
    return "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"


def _ranks_of_a_machine() -> int:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return math.gcd(ranks, torch.accelerator.device_count()) or ranks
