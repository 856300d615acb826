"""Hooks on the steps of all optimizers, for parameters that `fully_shard` replaced.

A plain tensor cannot become a DTensor in the same object, so the module gets a new parameter. The
old parameter, which other code may still hold, has no memory any more. Its ``grad`` is that of the
new parameter, and an optimizer that holds it steps the new one. Further hooks refuse optimizers
that need whole parameters, and warn about steps without gradients.
"""

import weakref
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import accumulated_gradient_hooks, gradient_hooks
from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import sharding_of

__all__ = ["current", "replace", "restore_ties", "watch_optimizers"]

_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


class ReplacedParameter(nn.Parameter):
    """A parameter that `fully_shard` replaced by a sharded one."""

    _sharded: nn.Parameter

    @property
    def grad(self) -> Tensor | None:
        return self._sharded.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._sharded.grad = value


def replace(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Free the memory of ``original``, move its hooks to ``sharded``, and link the two."""
    for hook in gradient_hooks(original):
        sharded.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in accumulated_gradient_hooks(original):
        sharded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    original.grad = None
    original.data = original.data.new_empty(0)
    original.__class__ = ReplacedParameter
    assert isinstance(original, ReplacedParameter)
    original._sharded = sharded


def current(parameter: Tensor) -> Tensor:
    """The parameter that replaced ``parameter``, or ``parameter`` itself."""
    return parameter._sharded if isinstance(parameter, ReplacedParameter) else parameter


def restore_ties(root: nn.Module) -> None:
    """Make modules of ``root`` that hold a replaced parameter hold the sharded one."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, ReplacedParameter):
                setattr(module, name, parameter._sharded)


@cache
def watch_optimizers() -> None:
    """Install the hooks, once per process."""
    register_optimizer_step_pre_hook(_take_sharded)
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


def _take_sharded(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Give ``optimizer`` the sharded parameters in place of the replaced ones.

    Raises:
        StepError: a gradient is not reduced yet.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if is_unreduced(parameter.grad):
                parameter.grad.refuse(f"{type(optimizer).__name__}.step()")
            if not isinstance(parameter, ReplacedParameter):
                continue
            if optimizer.state.pop(parameter, None):
                raise PlanError(
                    f"{type(optimizer).__name__} has states for parameters that fully_shard has "
                    "replaced since; build the optimizer after fully_shard"
                )
            group["params"][index] = parameter._sharded
