"""Replaces the parameters of a model by shards.

A plain tensor cannot become a DTensor in the same object, so the module gets a new parameter. The
old parameter, which other code may still hold, has no memory any more. Its ``grad`` is that of the
new parameter, and an optimizer that holds it steps the new one: a hook on the steps of all
optimizers replaces it. Operations on its elements raise an error.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import shardwise.tensor.operations  # noqa: F401 - registers the operations on shards
from shardwise._private import pytree, share_gradient_hooks
from shardwise.errors import PlanError, ShardedTensorError
from shardwise.plan.options import UnitSettings
from shardwise.plan.units import keeps_its_class, named_parameters
from shardwise.runtime.accumulation import READS_NO_ELEMENTS, is_unreduced
from shardwise.runtime.parameters import ParameterOwner
from shardwise.tensor.sharding import Sharding, sharding_of

__all__ = [
    "IGNORED",
    "current",
    "ignored_within",
    "move_buffers",
    "owner_of",
    "parameter_of",
    "parameters_of",
    "pass_on",
    "put_sharded",
    "replace_parameter",
    "restore_ties",
    "settings_of",
    "share_settings",
    "shares_settings",
    "take_sharded",
    "watch_optimizers",
]

IGNORED = "_shardwise_ignored"  # the names of parameters that the call for a module ignored
_SETTINGS = "_shardwise_settings"  # the `UnitSettings` of a module
# What the new parameter does in place of a replaced one.
_PASSED_ON = READS_NO_ELEMENTS | {"register_hook", "register_post_accumulate_grad_hook"}


def move_buffers(root: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``root`` to ``device``, where its parameters will be gathered."""
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def settings_of(module: nn.Module) -> UnitSettings:
    """The settings of ``module`` as a unit; it may not be sharded yet."""
    settings: UnitSettings = module.__dict__.setdefault(_SETTINGS, UnitSettings())
    return settings


def shares_settings(module: nn.Module) -> bool:
    """Whether a module inside ``module`` has its settings."""
    settings = settings_of(module)
    others = (one for one in module.modules() if one is not module)
    return any(vars(one).get(_SETTINGS) is settings for one in others)


def share_settings(module: nn.Module, other: nn.Module) -> None:
    """Make the settings of ``other`` those of ``module``, which is not sharded yet."""
    module.__dict__[_SETTINGS] = settings_of(other)


def put_sharded(
    root: nn.Module, original: nn.Parameter, sharding: Sharding, payload: Tensor
) -> tuple[list[ParameterOwner], nn.Parameter]:
    """Put ``payload`` in place of ``original``. Returns its owners and the new parameter."""
    watch_optimizers()
    owners = [owner_of(root, name) for name in sharding.extent.parameter.names]
    for owner in owners:
        owner.drop_weak_references()
    is_again = sharding_of(original) is not None
    sharded = replace_parameter(original, payload)
    if is_again and sharded is not original:
        raise PlanError(
            f"{sharding.name}: other code holds a weak reference to this parameter, perhaps in a "
            "WeakKeyDictionary, so a conversion or requires_grad_(True) would replace it, and "
            "optimizers would go on with the old one; drop the reference, or do it before "
            "fully_shard"
        )
    sharding.attach_to(sharded)
    for owner in owners:
        owner.put(sharded)
    if sharded is not original and not (isinstance(original, DTensor) or keeps_its_class(original)):
        pass_on(original, sharded)
    return owners, sharded


def owner_of(root: nn.Module, name: str) -> ParameterOwner:
    """The owner of the parameter ``name`` of ``root``."""
    path, _, attribute = name.rpartition(".")
    return ParameterOwner(root.get_submodule(path), attribute)


def parameter_of(root: nn.Module, name: str) -> nn.Parameter:
    """The parameter ``name`` of ``root``, whose module may compute its attribute from it."""
    return cast("nn.Parameter", owner_of(root, name).get())


def ignored_within(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Parameters that calls of `fully_shard` for modules inside ``modules`` have ignored."""
    return [
        parameter
        for inner in (m for one in modules if isinstance(one, nn.Module) for m in one.modules())
        if (names := vars(inner).get(IGNORED, ()))
        for name, parameter in named_parameters(inner, remove_duplicate=False)
        if name in names  # `to_empty` may have made other parameters
    ]


def replace_parameter(original: nn.Parameter, payload: Tensor) -> nn.Parameter:
    """Return a parameter with ``payload``, the same object as ``original`` if possible."""
    parameter = nn.Parameter(payload, requires_grad=original.requires_grad)
    attributes = {key: v for key, v in vars(original).items() if key not in vars(parameter)}
    original.grad = None
    # A plain tensor cannot become a DTensor, and a tensor with weak references cannot be swapped.
    with contextlib.suppress(RuntimeError, TypeError):
        torch.utils.swap_tensors(original, parameter)  # type: ignore[no-untyped-call]
        parameter = original
    parameter.__dict__.update(attributes)
    return parameter


class ReplacedParameter(nn.Parameter):
    """A parameter that `fully_shard` replaced by a sharded one; it has no elements."""

    _sharded: nn.Parameter

    @property
    def grad(self) -> Tensor | None:
        return self._sharded.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._sharded.grad = value

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of the sharded one, so that a copied optimizer steps that of a copied model."""
        return copy.deepcopy(self._sharded, memo)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        replaced = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
        if func.__name__ not in _PASSED_ON:
            sharding = sharding_of(replaced[0]._sharded)
            name = "a parameter" if sharding is None else sharding.name
            raise ShardedTensorError(
                f"{name}: {func.__name__} needs the values of a parameter that fully_shard has "
                "replaced since; list model.parameters() after fully_shard, and share parameters "
                "with other modules after it"
            )
        return func(current(args[0]), *args[1:], **(kwargs or {}))


def pass_on(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Free the memory of ``original``, give its hooks to ``sharded``, and link the two."""
    share_gradient_hooks(original, sharded)
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


def unowned_states(optimizer: Optimizer) -> dict[Any, Any]:
    """The states under keys that are not parameters, such as ``state["k"]`` of MADGRAD."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def restore_ties(root: nn.Module) -> None:
    """Make modules of ``root`` that hold a replaced parameter hold the sharded one."""
    for module in root.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, ReplacedParameter):
                setattr(module, name, parameter._sharded)


def take_sharded(optimizer: Optimizer) -> None:
    """Give ``optimizer`` the sharded parameters in place of the replaced ones.

    Raises:
        PlanError: it has states for replaced ones.
    """
    for group in optimizer.param_groups:
        if ReplacedParameter in map(type, group["params"]):
            replaced = [one for one in group["params"] if isinstance(one, ReplacedParameter)]
            if any(optimizer.state.pop(one, None) for one in replaced):
                raise PlanError(
                    f"{type(optimizer).__name__} has states for parameters that fully_shard has "
                    "replaced since; build the optimizer after fully_shard"
                )
            group["params"][:] = map(current, group["params"])


@cache
def watch_optimizers() -> None:
    """Install the hooks, once per process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_count_versions)


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Raise a StepError if a gradient is not reduced yet; otherwise, `take_sharded`."""
    for parameter in parameters_of(optimizer):
        if is_unreduced(parameter.grad):
            parameter.grad.refuse(f"{type(optimizer).__name__}.step()")
    take_sharded(optimizer)


def _count_versions(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Increment the versions of the DTensors that ``optimizer`` has stepped.

    torch's fused and foreach optimizers do not, and other optimizers may write to local tensors.
    """
    stepped = (p for p in parameters_of(optimizer) if p.grad is not None and isinstance(p, DTensor))
    torch.autograd.graph.increment_version(list(stepped))
