"""Parameters that somebody, such as an optimizer, holds from before `fully_shard`.

A DTensor cannot take the place of a plain tensor in the same object, so the module has a new
parameter. The old one has no memory any more. It shows the gradient of the new one, and an
optimizer that holds it steps the new one.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import accumulated_gradient_hooks, gradient_hooks
from shardwise.errors import PlanError

__all__ = ["current", "replace", "restore_ties"]


class ReplacedParameter(nn.Parameter):
    """Stands for the sharded parameter where this is held."""

    _sharded: nn.Parameter

    @property
    def grad(self) -> Tensor | None:
        return self._sharded.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._sharded.grad = value


def replace(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Free the memory of ``original``, and have it stand for ``sharded``, with its hooks."""
    for hook in gradient_hooks(original):
        sharded.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in accumulated_gradient_hooks(original):
        sharded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    original.grad = None
    original.data = original.data.new_empty(0)
    original.__class__ = ReplacedParameter
    assert isinstance(original, ReplacedParameter)
    original._sharded = sharded
    _watch_optimizers()


def current(parameter: Tensor) -> Tensor:
    """The parameter that ``parameter`` stands for, or else itself."""
    return parameter._sharded if isinstance(parameter, ReplacedParameter) else parameter


def restore_ties(root: nn.Module) -> None:
    """Have modules of ``root`` that hold a replaced parameter hold the sharded one."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, ReplacedParameter):
                setattr(module, name, parameter._sharded)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_take_sharded)


def _take_sharded(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Have ``optimizer`` step the sharded parameters from now on."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if not isinstance(parameter, ReplacedParameter):
                continue
            if optimizer.state.pop(parameter, None):
                raise PlanError(
                    f"{type(optimizer).__name__} has states for parameters that fully_shard has "
                    "replaced since; build the optimizer after fully_shard"
                )
            group["params"][index] = parameter._sharded
