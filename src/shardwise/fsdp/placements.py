"""FSDP2's ``shard_placement_fn`` that also chooses the mesh of a parameter.

It returns a ``ShardPlacementResult`` with a placement and a ``mesh_info``, for example for experts,
which are sharded over other ranks than the block around them. FSDP2 gathers all parameters of the
block together; here, the modules that hold such parameters become units of their own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import PlanError
from shardwise.plan.policies import is_never_called
from shardwise.plan.units import named_parameters
from shardwise.runtime.attach import current, share_settings
from shardwise.tensor.sharding import sharding_of

__all__ = ["shard_on_other_meshes"]

Place = Callable[[nn.Parameter], Any]


def shard_on_other_meshes(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    place: Place,
    ignored: Collection[nn.Parameter],
    shard: Callable[..., Any],
) -> Place:
    """Shard the parts of ``modules`` whose parameters ``place`` puts on other meshes than ``mesh``.

    Args:
        modules: the modules to shard.
        mesh: the data-parallel mesh of all other parameters; None is all ranks.
        place: FSDP2's ``shard_placement_fn``.
        ignored: parameters to leave alone.
        shard: is called with each part, its mesh and the placements of its parameters.

    Returns:
        ``place`` without meshes.

    Raises:
        PlanError: a module has parameters on several meshes.
    """

    def placement(parameter: nn.Parameter) -> Any:
        result = place(parameter)
        return result.placement if hasattr(result, "mesh_info") else result

    for module in modules:
        elsewhere = {}
        for _, parameter in named_parameters(module, ignored=ignored):
            if sharding_of(current(parameter)) is None:
                info = getattr(place(parameter), "mesh_info", None)
                is_same = info is None or _is_same(info.mesh, mesh)
                elsewhere[parameter] = None if is_same else info
        if elsewhere and None not in elsewhere.values():
            raise PlanError(
                f"shard_placement_fn: all parameters of {type(module).__name__} are on other "
                "meshes than mesh=; pass theirs"
            )
        for part, info in list(_parts(module, "", elsewhere)):
            if _ranks(info.mesh) == _ranks(mesh):
                raise PlanError(
                    f"shard_placement_fn: {info.mesh} has the ranks of mesh= in another shape; "
                    "return placements on mesh="
                )
            share_settings(part, module)
            dims = getattr(info, "dp_mesh_dims", None)
            own = info.mesh if dims is None else info.spmd_mesh
            shard(part, mesh=own, dp_mesh_dims=dims, shard_placement_fn=placement)
    return placement


def _parts(
    module: nn.Module, prefix: str, elsewhere: Mapping[nn.Parameter, Any]
) -> Iterator[tuple[nn.Module, Any]]:
    """The largest modules inside ``module`` whose parameters are all on one other mesh."""
    for name, parameter in module.named_parameters(recurse=False):
        if elsewhere.get(parameter) is not None:
            raise PlanError(
                f"shard_placement_fn: {prefix}{name} is on another mesh than other parameters of "
                "its module, or has another FSDPMeshInfo object, and these are gathered for the "
                "same forward; put those of each mesh in a module of their own, whose forward uses "
                "them, and return the same object for them"
            )
    for name, child in module.named_children():
        found = [elsewhere[p] for p in child.parameters() if p in elsewhere]
        if all(info is None for info in found):
            continue
        if is_never_called(child) or any(info is not found[0] for info in found):
            yield from _parts(child, f"{prefix}{name}.", elsewhere)
        else:
            yield child, found[0]


def _ranks(mesh: DeviceMesh | None) -> set[int]:
    return set(range(dist.get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())


def _is_same(mesh: DeviceMesh, other: DeviceMesh | None) -> bool:
    ranks = torch.arange(dist.get_world_size()) if other is None else other.mesh
    return torch.equal(mesh.mesh, ranks)
