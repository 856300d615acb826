"""FSDP2's functions: `fully_shard` and its companions."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from shardwise import api
from shardwise._private import register_fully_shard
from shardwise.errors import PlanError
from shardwise.features.deferred import when_sharded
from shardwise.features.fsdp_module import FSDPModule
from shardwise.fsdp.errors import UnsupportedError, WrapperError
from shardwise.plan.granularity import Granularities
from shardwise.runtime.module import handle_of, register_forward_method
from shardwise.tensor.mesh import data_parallel_part
from shardwise.tensor.sharding import sharding_of

__all__ = ["DataParallelMeshDims", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    granularity: Granularities | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    **options: Any,
) -> M:
    """Shard ``module`` as `shardwise.fully_shard` does, with FSDP2's defaults and errors.

    See `shardwise.fully_shard` for the options. The defaults differ as follows: parameters are cut
    along a dim, as in FSDP2 (``granularity="dim"``); shards keep the parameter's dtype, even for
    trainable 16-bit parameters; and values that differ between ranks cause a warning, not an
    error.
    """
    modules = module if isinstance(module, Sequence) else (module,)
    if granularity is None:
        dims = options.get("dp_mesh_dims")
        data_mesh = mesh
        if dims is not None:
            data_mesh = data_parallel_part(mesh, dims.shard_names, dims.replicate_names)
        check_as_fsdp2(modules, data_mesh, shard_placement_fn, ignored_params or ())
    api.fully_shard(
        module,
        mesh=mesh,
        granularity=granularity or "dim",
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
        **{"mp_policy": MixedPrecisionPolicy(), "on_different_values": "warn", **options},
    )
    for each in modules:
        register_fully_shard(each)
    return module


update_wrapper(fully_shard, api.fully_shard, assigned=())  # copies the signature
fully_shard.state = handle_of  # type: ignore[attr-defined]  # as in FSDP2: a module's state


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit ``module`` around calls of ``module.method_name``, as around its forward.

    As in FSDP2, this has no effect on a module that is not a unit.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Do nothing: models over the same ranks always share their communicators."""


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
    """The parameters of ``module`` that are in no unit; none if it is not a module."""
    named = module.named_parameters() if isinstance(module, nn.Module) else ()
    return ((name, parameter) for name, parameter in named if sharding_of(parameter) is None)


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


Names = str | tuple[str, ...] | None


@dataclass
class _DataParallelMeshDims:
    """The dims of a mesh over which `fully_shard` shards and replicates parameters."""

    shard: Names = None
    replicate: Names = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard=, replicate= or both, got none")

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_tuple(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_tuple(self.replicate)


def _as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


DataParallelMeshDims: Any = getattr(fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
