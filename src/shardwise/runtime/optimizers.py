"""Parameters that `fully_shard` replaced, and a hook on the steps of all optimizers for them.

A plain tensor cannot become a DTensor in the same object, so the module gets a new parameter. The
old parameter, which other code may still hold, has no memory any more. Its ``grad`` is that of the
new parameter, and an optimizer that holds it steps the new one.
"""

from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise._private import accumulated_gradient_hooks, gradient_hooks
from shardwise.errors import PlanError
from shardwise.runtime.accumulation import is_unreduced

__all__ = ["current", "parameters_of", "replace", "restore_ties", "watch_optimizers"]


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


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of ``optimizer``, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def restore_ties(root: nn.Module) -> None:
    """Make modules of ``root`` that hold a replaced parameter hold the sharded one."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, ReplacedParameter):
                setattr(module, name, parameter._sharded)


@cache
def watch_optimizers() -> None:
    """Install the hook, once per process."""
    register_optimizer_step_pre_hook(_take_sharded)


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
