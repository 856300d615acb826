"""Hooks on the steps of all optimizers, which refuse or warn about mistakes with shards."""

import weakref
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import sharding_of

__all__ = ["check_optimizers"]

_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@cache
def check_optimizers() -> None:
    """Install the hooks, once per process, after that of `runtime.optimizers`."""
    register_optimizer_step_pre_hook(_refuse_shards)
    register_optimizer_step_pre_hook(_warn_of_empty_step)


def _warn_of_empty_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Warn about a step in which no parameter has a gradient, as it would do nothing silently."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if optimizer in _warned or any(one.grad is not None for one in parameters):
        return
    names = [
        sharding.name
        for parameter in parameters
        if parameter.requires_grad
        and (sharding := sharding_of(parameter)) is not None
        and not getattr(parameter, STEPS_IN_BACKWARD, False)
    ]
    if names:
        _warned.add(optimizer)
        warn_caller(
            f"{type(optimizer).__name__} steps, and none of its {len(parameters)} parameters has a "
            f"gradient (the first is {names[0]}). loss.backward(inputs=...) computes none for "
            "sharded parameters: call loss.backward()",
        )


# torch's optimizers that need whole parameters, and what to use instead.
_NEED_WHOLE_PARAMETERS = {
    "Muon": "use shardwise.optim.Muon, which has its options and numbers",
    "Adafactor": "use shardwise.optim.Adam8bit, which saves memory, too",
    "LBFGS": 'pass granularity="dim" to fully_shard, with which torch gathers what it needs',
}


def _refuse_shards(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Refuse an optimizer that needs whole parameters, and say what to use instead."""
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim")
    if not is_torch or kind.__name__ not in _NEED_WHOLE_PARAMETERS:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sharding = sharding_of(parameter)
            # torch can compute with its own DTensors, except in Adafactor (torch 2.13).
            is_refused = isinstance(parameter, ShardedTensor) or kind.__name__ == "Adafactor"
            if sharding is not None and is_refused:
                raise PlanError(
                    f"{sharding.name}: torch.optim.{kind.__name__} needs whole parameters, and "
                    f"each rank has a part; {_NEED_WHOLE_PARAMETERS[kind.__name__]}"
                )
