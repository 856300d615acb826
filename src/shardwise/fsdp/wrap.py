"""FSDP1's wrap policies, which are PyTorch's own, and the wrapping of the modules they choose.

A policy function is called as ``policy(module=, recurse=, nonwrapped_numel=)``: with
``recurse=True`` before the children are visited ("visit them?") and with ``recurse=False`` after
that ("wrap this module?"). `shardwise.fully_shard` takes the same policies as ``units``.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy as TorchCustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from shardwise.errors import PlanError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_module_wrap_policy",
    "_or_policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
    "wrap_children",
]

Wrapper = Callable[..., nn.Module]
Policy = Callable[..., bool]


class CustomPolicy(TorchCustomPolicy):
    """PyTorch's policy, which is also callable, so that it can be passed as ``units``."""

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:
        return recurse or bool(self._lambda_fn(module))


def wrap_children(
    root: nn.Module,
    policy: Any,
    wrapper: Wrapper,
    options: Mapping[str, Any],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Wrap the modules inside ``root`` that ``policy`` chooses, innermost first.

    Raises:
        PlanError: ``root`` contains a module that is already wrapped.
    """
    _check_none_wrapped(root, wrapper, ignored_modules)
    if isinstance(policy, (ModuleWrapPolicy, TorchCustomPolicy)):
        # These policies choose modules, and options for each, before any module is wrapped. The
        # only interface for that is private.
        chosen = policy._run_policy(root, set(ignored_modules), dict(options))
        _wrap_chosen(root, chosen, wrapper)
        return
    ignored = {id(parameter) for parameter in ignored_params}
    _wrap_recursively(root, policy, wrapper, options, (ignored_modules, ignored), is_root=True)


def _check_none_wrapped(
    root: nn.Module, wrapper: Wrapper, ignored_modules: Collection[nn.Module]
) -> None:
    if not isinstance(wrapper, type):
        return
    for name, module in root.named_modules():
        if module not in ignored_modules and isinstance(module, wrapper):
            raise PlanError(
                f"{name or 'the root module'} is already wrapped; pass auto_wrap_policy to the "
                "outermost wrapper only, or wrap all modules by hand"
            )


def _wrap_chosen(
    module: nn.Module, chosen: Mapping[nn.Module, dict[str, Any]], wrapper: Wrapper
) -> None:
    for name, child in module.named_children():
        _wrap_chosen(child, chosen, wrapper)
        if child in chosen:
            setattr(module, name, wrapper(child, **chosen[child]))


def _wrap_recursively(
    module: nn.Module,
    policy: Policy,
    wrapper: Wrapper,
    options: Mapping[str, Any],
    ignored: tuple[Collection[nn.Module], set[int]],
    *,
    is_root: bool = False,
) -> tuple[nn.Module, int]:
    """``module``, wrapped if ``policy`` chooses it, and the number of wrapped elements in it."""
    modules, parameters = ignored
    total = sum(p.numel() for p in module.parameters() if id(p) not in parameters)
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return module, 0
    num_wrapped = 0
    for name, child in module.named_children():
        if child not in modules:
            replaced, count = _wrap_recursively(child, policy, wrapper, options, ignored)
            setattr(module, name, replaced)
            num_wrapped += count
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=total - num_wrapped):
        return module, num_wrapped
    return wrapper(module, **options), total
