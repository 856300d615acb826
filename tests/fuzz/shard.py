"""From a drawn `Sharding` to a call of `fully_shard`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise as sw
from shardwise.plan.policies import choose_units, is_never_called
from shardwise.plan.strategy import resolve_strategy
from shardwise.tensor.mesh import resolve_mesh
from tests.fuzz.build import Net
from tests.fuzz.programs import STEPPED_ON_DEVICE, Case, Classes, Manual, Sharding

__all__ = ["mesh_of_replicas", "shard"]


def shard(net: Net, sharding: Sharding, replicas: DeviceMesh | None = None) -> Net:
    """Shard ``net`` over all ranks, or over those of a replica, in the later dims of a mesh."""
    own = make_mesh(sharding, next(net.parameters()).device.type)
    if replicas is not None:
        names = replicas.mesh_dim_names or ()
        own = replicas[names[1:] if len(names) > 2 else names[1]]
    options: dict[str, Any] = {
        "strategy": sharding.strategy,
        "mesh": own,
        "prefetch": sharding.prefetch,
        "unused": sharding.unused,
        "granularity": _granularity(sharding),
        "offload_policy": offload_policy(sharding.offload),
        "wire": wire(sharding.wire),
        "communicators": sharding.communicators,
    }
    if sharding.casts:
        options["mp_policy"] = sw.MixedPrecisionPolicy(torch.float64, torch.float64)
    if isinstance(sharding.units, Manual):
        _shard_one_by_one(net, sharding.units, options)
    else:
        options["units"] = fitting_units(net, sharding.units)
    return sw.fully_shard(net, reshard_after_forward=sharding.reshard, **options)


def _granularity(sharding: Sharding) -> str:
    refuses_dim = (
        resolve_strategy(sharding.strategy).is_two_level or sharding.offload == STEPPED_ON_DEVICE
    )
    return "element" if refuses_dim and sharding.granularity == "dim" else sharding.granularity


def offload_policy(name: str | None) -> sw.OffloadPolicy:
    if name is None:
        return sw.OffloadPolicy()
    if name == STEPPED_ON_DEVICE:
        return sw.CPUOffloadPolicy(step="device")
    return sw.CPUOffloadPolicy(parameters=name == "all")


def wire(name: str | None) -> sw.Wire:
    if name is None:
        return sw.Wire()
    gather = None if name == "reductions" else "int8"
    reduce = None if name == "gathers" else "int4"
    return sw.Wire(gather, reduce, block=8, error_feedback=name.endswith("feedback"))


def make_mesh(sharding: Sharding, device_type: str) -> DeviceMesh | None:
    """Two dimensions, replicas and shards, for a strategy that has to have them."""
    if not wants_two_dims(sharding.strategy):
        return None
    ranks = dist.get_world_size()
    replicas = _divisor(ranks, sharding.replicas)
    shape, names = (replicas, ranks // replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if device_type == "cpu":
        return mesh
    return DeviceMesh.from_group(
        mesh.get_all_groups(), device_type, mesh.mesh, mesh_dim_names=names
    )


def mesh_of_replicas(case: Case) -> DeviceMesh | None:
    """With an outer axis: replicas, and what `make_mesh` makes of the ranks of each."""
    if case.outer is None:
        return None
    ranks = dist.get_world_size()
    outer = _divisor(ranks, 1)
    if not wants_two_dims(case.sharding.strategy):
        return init_device_mesh("cpu", (outer, ranks // outer), mesh_dim_names=("outer", "shard"))
    inner = _divisor(ranks // outer, case.sharding.replicas)
    return init_device_mesh(
        "cpu",
        (outer, inner, ranks // outer // inner),
        mesh_dim_names=("outer", "replicate", "shard"),
    )


def _divisor(ranks: int, number: int) -> int:
    """One of those of ``ranks``, counted modulo how many there are."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return divisors[number % len(divisors)]


def wants_two_dims(strategy: str) -> bool:
    """Asks the engine itself, which refuses no mesh where it cannot do without one."""
    try:
        resolve_mesh(None, resolve_strategy(strategy))
    except sw.PlanError:
        return True
    return False


def fitting_units(net: nn.Module, units: Classes | str | int | None) -> Any:
    """``units`` as `fully_shard` takes them; None where they would match nothing."""
    chosen: Any = units
    if isinstance(units, Classes):
        chosen = {type(m) for m in net.modules() if type(m).__name__ in units.names} or None
    try:
        choose_units(net, chosen)
    except sw.PlanError:
        return None
    return chosen


def _shard_one_by_one(net: nn.Module, units: Manual, options: dict[str, Any]) -> None:
    """As in FSDP2: inner modules first."""
    callable_ = [m for m in net.modules() if m is not net and not is_never_called(m)]
    chosen = {number % len(callable_): reshard for number, reshard in units.modules}
    for number, reshard in sorted(chosen.items(), reverse=True):
        sw.fully_shard(callable_[number], reshard_after_forward=reshard, **options)
