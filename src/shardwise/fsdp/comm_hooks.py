"""FSDP1's communication hooks: user functions that reduce the gradients of a unit."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shardwise.errors import PlanError
from shardwise.fsdp.api import ShardingStrategy
from shardwise.fsdp.errors import WrapperError
from shardwise.runtime.attach import settings_of
from shardwise.runtime.module import FSDPModule

__all__ = ["register_comm_hook"]

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def register_comm_hook(wrappers: Iterable[Any], state: object, hook: Callable[..., None]) -> None:
    """Let ``hook`` reduce the gradients of each of ``wrappers``, which are FSDP1 modules.

    Raises:
        PlanError: ``hook`` is not callable.
        WrapperError: a wrapper already has a hook, or a strategy over two axes.
    """
    if not callable(hook):
        raise PlanError(f"register_comm_hook: expected a callable hook, got {hook!r}")
    wrappers = list(wrappers)
    for wrapper in wrappers:
        if wrapper.sharding_strategy in _HYBRID:
            raise WrapperError(
                "Communication hook is not supported for hybrid strategies: "
                f"{wrapper.sharding_strategy}"
            )
        if wrapper._comm_hook is not None:
            raise WrapperError("A communication hook is already registered")
    for wrapper in wrappers:
        wrapper._comm_hook, wrapper._comm_hook_state = hook, state
        if isinstance(wrapper.module, FSDPModule):  # a wrapped list of modules is not a unit
            settings_of(wrapper.module).reduce_hook = partial(hook, state)
