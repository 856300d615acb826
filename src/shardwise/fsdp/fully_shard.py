"""FSDP2's functions."""

from functools import partial, update_wrapper

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import api
from shardwise.features.deferred import when_sharded
from shardwise.runtime.module import FSDPModule, handle_of, register_forward_method

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

# With FSDP2's defaults: its placements; shards in the parameter's dtype, where ours are float32 for
# trainable parameters in 16 bits; ranks may build different values.
fully_shard = partial(
    api.fully_shard,
    granularity="dim",
    mp_policy=MixedPrecisionPolicy(),  # type: ignore[arg-type]
    on_different_values="warn",
)
update_wrapper(fully_shard, api.fully_shard)
fully_shard.state = handle_of  # type: ignore[attr-defined]  # as in FSDP2: one for each module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit ``module`` around calls of ``module.method_name``, as around its forward.

    As in FSDP2, has no effect on a module that is not a unit.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Has no effect: models over the same ranks always share their communicators."""
