"""FSDP2's functions."""

from functools import partial, update_wrapper

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import api
from shardwise.features.deferred import when_sharded
from shardwise.runtime.module import FSDPModule, register_forward_method

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

# `shardwise.fully_shard` with FSDP2's default: shards keep the dtype of the parameter, where ours
# are float32 for trainable parameters in 16 bits.
fully_shard = partial(api.fully_shard, mp_policy=MixedPrecisionPolicy())  # type: ignore[arg-type]
update_wrapper(fully_shard, api.fully_shard)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit ``module`` around calls of ``module.method_name``, as around its forward.

    A module that is not sharded stays as it is, as with FSDP2.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Does nothing: models over the same ranks share their communicators."""
