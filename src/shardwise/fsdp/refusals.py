"""The checks that FSDP2 makes before it shards a module, with exceptions of the same types.

They apply to FSDP2's placements, ``Shard(dim)``. With ``granularity="element"``, the engine also
shards scalars, and dims that are not divisible by the number of ranks.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.fsdp.errors import UnsupportedError, WrapperError
from shardwise.runtime.attach import current
from shardwise.tensor.sharding import sharding_of

__all__ = ["check_as_fsdp2"]

_WAY_OUT = "or pass granularity='element', which cuts anywhere"


def check_as_fsdp2(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    place: Callable[[nn.Parameter], Any] | None,
    ignored: Collection[nn.Parameter],
) -> None:
    """Raise for modules, parameters, placements and meshes that FSDP2 does not accept."""
    if mesh is not None and mesh.ndim == 2 and mesh.mesh_dim_names is None:  # noqa: PLR2004
        raise WrapperError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified, such as "
            "mesh_dim_names=('replicate', 'shard')"
        )
    ignored_ids = {id(parameter) for parameter in ignored}
    for module in modules:
        if isinstance(module, FSDPModule):
            raise WrapperError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{type(module).__name__} is sharded already; shard the root last and once"
            )
        for name, parameter in _unsharded(module):
            if id(parameter) not in ignored_ids:
                _check_parameter(name, parameter)
                if place is not None:
                    _check_placement(name, parameter, place(parameter), mesh)


def _unsharded(module: object) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of ``module`` that are in no unit; none if it is not a module.

    A unit outside of ``module`` may have one that is tied.
    """
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    return ((name, one) for name, one in named if sharding_of(current(one)) is None)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    shape = tuple(parameter.shape)
    if not shape:
        raise PlanError(
            f"{name} is a scalar, and FSDP2's placements cut along a dim. Change {name} to a 1D "
            f"tensor with numel equal to 1. {_WAY_OUT.capitalize()}"
        )
    if not parameter.is_contiguous():
        raise UnsupportedError(
            f"FSDP does not support non-contiguous parameters yet: {name} {shape} has strides "
            f"{parameter.stride()}; make it contiguous"
        )


def _check_placement(
    name: str, parameter: nn.Parameter, placement: Any, mesh: DeviceMesh | None
) -> None:
    dim = getattr(placement, "dim", 0)
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    if dim >= local.ndim:
        raise WrapperError(
            f"Shard dim {dim} is invalid for {local.ndim}D tensor: {name} {tuple(local.shape)}; "
            "return Shard of one of its dims, or None"
        )
    size = local.shape[dim]
    num_ranks = _num_shards(mesh)
    if dim % local.ndim and size % num_ranks:
        raise UnsupportedError(
            f"FSDP does not support uneven sharding on dim {dim % local.ndim}: {name} "
            f"{tuple(local.shape)} over {num_ranks} ranks; return None for it, {_WAY_OUT}"
        )


def _num_shards(mesh: DeviceMesh | None) -> int:
    if mesh is not None:
        return mesh.size(mesh.ndim - 1)
    return dist.get_world_size() if dist.is_initialized() else 1
