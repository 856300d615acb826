"""FSDP2's functions: `fully_shard` and its companions."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial, update_wrapper
from typing import Any, TypeVar

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import api
from shardwise._private import register_fully_shard
from shardwise.features.deferred import when_sharded
from shardwise.features.fsdp_module import FSDPModule, FSDPState
from shardwise.fsdp.placements import shard_on_other_meshes
from shardwise.fsdp.refusals import check_as_fsdp2
from shardwise.plan.granularity import Granularities
from shardwise.runtime.attach import ignored_within
from shardwise.runtime.module import handle_of, register_forward_method
from shardwise.tensor.mesh import data_parallel_part

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
    options = {"mp_policy": MixedPrecisionPolicy(), "on_different_values": "warn", **options}
    ignored = [*(ignored_params or ()), *ignored_within(modules)]
    dims = options.get("dp_mesh_dims")
    data_mesh = mesh
    if dims is not None:
        data_mesh = data_parallel_part(mesh, dims.shard_names, dims.replicate_names)
    if shard_placement_fn is not None:
        policy = options["mp_policy"]
        if policy is not None:  # the conversions are those around the whole module
            policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
        inner = {**options, "mp_policy": policy, "granularity": granularity, "units": None}
        shard = partial(fully_shard, ignored_params=ignored_params, **inner)
        shard_placement_fn = shard_on_other_meshes(
            modules, data_mesh, shard_placement_fn, ignored, shard
        )
    if granularity is None:
        check_as_fsdp2(modules, data_mesh, shard_placement_fn, ignored)
    api.fully_shard(
        module,
        mesh=mesh,
        granularity=granularity or "dim",
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
        **options,
    )
    for each in modules:
        register_fully_shard(each)
    return module


update_wrapper(fully_shard, api.fully_shard, assigned=())  # copies the signature


def _state(module: nn.Module) -> FSDPState:
    handle_of(module)  # raises an error if it is not a unit
    return FSDPState(module)


fully_shard.state = _state  # type: ignore[attr-defined]  # as in FSDP2


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit ``module`` around calls of ``module.method_name``, as around its forward.

    As in FSDP2, this has no effect on a module that is not a unit.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Do nothing: models over the same ranks always share their communicators."""


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
