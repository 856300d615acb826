"""FSDP2's functions."""

from functools import partial, update_wrapper

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise import api
from shardwise.features.deferred import when_sharded
from shardwise.runtime.module import FSDPModule, register_forward_method

__all__ = ["fully_shard", "register_fsdp_forward_method", "share_comm_ctx"]

# As in FSDP2, shards keep the dtype of the parameter by default. `shardwise.fully_shard` keeps
# trainable bfloat16 and float16 parameters in float32.
fully_shard = partial(api.fully_shard, mp_policy=MixedPrecisionPolicy())  # type: ignore[arg-type]
update_wrapper(fully_shard, api.fully_shard)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit ``module`` around calls of ``module.method_name``, as around its forward.

    As in FSDP2, has no effect on a module that is not a unit.
    """
    if isinstance(module, FSDPModule):
        when_sharded(module, lambda: register_forward_method(module, method_name))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Has no effect: models over the same ranks always share their communicators."""
