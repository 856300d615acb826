"""Optimizer steps without any gradient, which change nothing and would say nothing."""

import warnings
import weakref
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharding import sharding_of

__all__ = ["warn_of_empty_steps"]

_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@cache
def warn_of_empty_steps() -> None:
    """Look at every optimizer's steps from now on."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    groups = optimizer.param_groups
    if any(one.grad is not None for group in groups for one in group["params"]):
        return
    if optimizer in _warned:
        return
    parameters = [one for group in groups for one in group["params"]]
    names = [
        sharding.name
        for parameter in parameters
        if parameter.requires_grad
        and (sharding := sharding_of(parameter)) is not None
        and not getattr(parameter, STEPS_IN_BACKWARD, False)
    ]
    if names:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} steps, and none of its {len(parameters)} parameters has a "
            f"gradient (the first is {names[0]}). loss.backward(inputs=...) gives none to sharded "
            "parameters: call loss.backward()",
            stacklevel=4,
        )
