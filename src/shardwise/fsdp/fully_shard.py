"""FSDP2's functions: their options, as calls of the engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise import api
from shardwise.errors import PlanError
from shardwise.fsdp.deferred import defer, is_deferred, when_sharded
from shardwise.plan.offload import NO_OFFLOAD, OffloadPolicy
from shardwise.plan.precision import AS_IT_CAME, MixedPrecisionPolicy
from shardwise.runtime.module import FSDPModule, register_forward_method

__all__ = ["as_they_came", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,  # noqa: ARG001
    mp_policy: MixedPrecisionPolicy = AS_IT_CAME,
    offload_policy: OffloadPolicy = NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Shard ``module`` as FSDP2 does: call it for each block and then for the root.

    The differences, none of them in numbers:

    - a rank's part of a parameter is a run of its elements, so ``to_local()`` is 1-D and
      ``shard_placement_fn``, which says along which dim to cut, has nothing to decide;
    - a module on the meta device is sharded when it gets storage (``to_empty``, or
      ``load_state_dict(assign=True)`` and then the first forward), block by block, so that no rank
      has the whole of it at once.

    Args:
        module: one module; or several, each of which becomes a unit of its own.
        mesh: 1-D shards; 2-D repeats the model over its first dimension and shards over its second.
        reshard_after_forward: as in FSDP2.
        shard_placement_fn: taken, and not asked.
        mp_policy: as in FSDP2; parameters keep the dtype in which they came.
        offload_policy: as in FSDP2.
        ignored_params: left alone; name them in the calls for enclosing modules as well.
        dp_mesh_dims: refused; pass those dimensions as ``mesh``.

    Raises:
        PlanError: the options do not fit the model or each other.
    """
    if dp_mesh_dims is not None:
        raise PlanError("dp_mesh_dims: pass these dimensions alone, as in mesh=mesh['shard']")

    def shard(one: nn.Module) -> None:
        api.fully_shard(
            one,
            mesh=mesh,
            strategy="fsdp" if mesh is None or mesh.ndim == 1 else "hsdp",
            reshard_after_forward=reshard_after_forward,
            mp_policy=as_they_came(one, mp_policy),
            offload_policy=offload_policy,
            ignored_params=ignored_params,
        )

    for one in module if isinstance(module, Sequence) else (module,):
        if not isinstance(one, nn.Module):
            raise PlanError(f"fully_shard takes torch.nn.Modules, got a {type(one).__name__}")
        if is_deferred(one):
            defer(one, partial(shard, one))
        else:
            shard(one)
    return module


def as_they_came(module: nn.Module, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy``, with shards in the dtype of the parameters, as FSDP has them: no masters."""
    low = {p.dtype for p in module.parameters() if p.dtype in (torch.bfloat16, torch.float16)}
    if policy.master_dtype is not None or not low:
        return policy
    if len(low) > 1:
        raise PlanError("parameters in bfloat16 and in float16; convert the model to one of them")
    return replace(policy, master_dtype=low.pop())


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have ``module.method_name(...)`` gather the unit as calling it does.

    A module that is not sharded stays as it is, as with FSDP2.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Does nothing: models over the same ranks share their links."""
