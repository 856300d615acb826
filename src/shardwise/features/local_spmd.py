"""Parameters with types of the package ``spmd_types``, which FSDP2 takes since PyTorch 2.15.

They are plain tensors, each rank's part of a larger one, and their types say on which axes. They
become DTensors on the mesh of the call; modules still compute with plain tensors.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from shardwise.errors import PlanError
from shardwise.plan.units import named_parameters
from shardwise.runtime.attach import current, owner_of, pass_on
from shardwise.tensor.sharding import mark_as_local

__all__ = ["make_dtensors"]

Place = Callable[[nn.Parameter], Any]


def make_dtensors(
    modules: Iterable[object],
    mesh: DeviceMesh | None,
    data_parallel: Collection[str],
    ignored: Collection[nn.Parameter],
    place: Place | None,
) -> Place | None:
    """Put DTensors on ``mesh`` in place of parameters with types; ``spmd_types`` is imported.

    ``data_parallel`` are the dims of ``mesh`` over which `fully_shard` shards and replicates.

    Returns:
        ``place``, which may also be called with these DTensors.

    Raises:
        PlanError: there are no such dims, or the types of a parameter lack another dim of ``mesh``.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    owners = []
    for root in (one for one in modules if isinstance(one, nn.Module)):
        for name, parameter in named_parameters(root, ignored=ignored, remove_duplicate=False):
            if isinstance(parameter, DTensor) or current(parameter) is not parameter:
                continue
            types = _types_of(parameter)
            if types and (mesh is None or not data_parallel):
                raise PlanError(
                    f"{name} has spmd_types {types}; pass the mesh of all its axes, and "
                    "dp_mesh_dims="
                )
            if types and mesh is not None:
                if parameter not in made:
                    made[parameter] = _as_dtensor(name, parameter, types, mesh, data_parallel)
                owners.append((owner_of(root, name), parameter))
    if not made:
        return place
    placements = {} if place is None else {new: place(old) for old, new in made.items()}
    for owner, parameter in owners:
        owner.put(made[parameter])
    for parameter, new in made.items():
        pass_on(parameter, new)
    return place and (lambda one: placements[one] if one in placements else place(one))


def _types_of(parameter: nn.Parameter) -> dict[Any, Any]:
    """The type of ``parameter`` by axis; empty if it has none."""
    runtime, types = import_module("spmd_types.runtime"), import_module("spmd_types.types")
    found = dict(sys.modules["spmd_types"].get_local_type(parameter))
    spec = runtime.get_partition_spec(parameter)
    return found if spec is None else {**found, **types.partition_spec_to_shard_types(spec)}


def _as_dtensor(
    name: str,
    parameter: nn.Parameter,
    types: dict[Any, Any],
    mesh: DeviceMesh,
    data_parallel: Collection[str],
) -> nn.Parameter:
    spmd: Any = sys.modules["spmd_types"]
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for dim in mesh.mesh_dim_names or ():
        if dim in data_parallel:
            placements.append(Replicate())
            of_gradient.append(Partial())
            continue
        kind = types.get(spmd.MeshAxis.of(mesh.get_group(dim)))
        if kind is None:
            raise PlanError(
                f"{name}: its spmd_types {types} do not name dim {dim!r} of the mesh that "
                "fully_shard gets; use spmd_types.assert_type for all dims that are not in "
                "dp_mesh_dims"
            )
        placements.append(spmd.spmd_type_to_dtensor_placement(kind))
        of_gradient.append(spmd.spmd_type_to_dtensor_placement(kind.backward_type()))
    whole = DTensor.from_local(parameter.data, mesh, placements, run_check=False)
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    made.__dict__.update(vars(parameter))
    mark_as_local(made, of_gradient)
    return made
