"""FSDP1's wrap policies, which are PyTorch's own, and the wrapping of the modules they choose.

A policy function is called as ``policy(module=, recurse=, nonwrapped_numel=)``: with
``recurse=True`` before the children are visited ("visit them?") and with ``recurse=False`` after
that ("wrap this module?"). `shardwise.fully_shard` accepts the same policies as ``units``.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy as TorchCustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from shardwise._warnings import warn_caller
from shardwise.errors import PlanError
from shardwise.features.full_precision import FullPrecision

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_module_wrap_policy",
    "_or_policy",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "default_auto_wrap_policy",
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
    """PyTorch's policy, made callable so that it can be passed as ``units``."""

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:
        return recurse or bool(self._lambda_fn(module))


def default_auto_wrap_policy(*args: Any, **options: Any) -> bool:
    """`size_based_auto_wrap_policy`, under its name in PyTorch 1.11."""
    warn_caller("default_auto_wrap_policy is now called size_based_auto_wrap_policy", FutureWarning)
    return bool(size_based_auto_wrap_policy(*args, **options))


def wrap_children(
    root: nn.Module,
    policy: Any,
    wrapper: Wrapper,
    options: Mapping[str, Any],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Wrap the modules inside ``root`` that ``policy`` chooses, innermost first.

    Modules that mixed precision leaves in full precision are also wrapped, without mixed precision.

    Raises:
        PlanError: ``root`` contains a module that is already wrapped.
    """
    _check_none_wrapped(root, wrapper, ignored_modules)
    classes = _full_precision_classes(options)
    full_precision = {
        module
        for module in root.modules()
        if module is not root and isinstance(module, classes) and module not in ignored_modules
    }
    _keep_full_precision(full_precision)
    without = {"mixed_precision": None}
    if isinstance(policy, _Policy):
        # These policies choose modules and options for each before any module is wrapped, which
        # only a private method does.
        chosen = policy._run_policy(root, set(ignored_modules), dict(options))
        chosen |= {m: {**chosen.get(m, options), **without} for m in full_precision}
        _wrap_chosen(root, chosen, wrapper, {})
        return
    if full_precision:
        by_class = partial(_wrap_module_cls_individually, module_classes=classes)
        policy = partial(_or_policy, policies=[policy, by_class])

    def wrap_one(module: nn.Module) -> nn.Module:
        return wrapper(module, **{**options, **(without if module in full_precision else {})})

    ignored = {id(parameter) for parameter in ignored_params}
    _wrap_recursively(root, policy, wrap_one, (ignored_modules, ignored), is_root=True)


def _full_precision_classes(options: Mapping[str, Any]) -> tuple[type[nn.Module], ...]:
    mixed_precision = options.get("mixed_precision")
    return () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)


def _keep_full_precision(modules: Collection[nn.Module]) -> None:
    """Cast the inputs and outputs of ``modules``, so that they compute in full precision."""
    if not modules:
        return
    classes = sorted({type(module).__name__ for module in modules})
    warn_caller(
        f"Both mixed precision and an auto_wrap_policy were given, and there are modules of "
        f"{', '.join(classes)}. These modules will be wrapped as separate FSDP modules, without "
        "mixed precision",
    )
    for module in modules:
        FullPrecision(module)


def _check_none_wrapped(
    root: nn.Module, wrapper: Wrapper, ignored_modules: Collection[nn.Module]
) -> None:
    if not isinstance(wrapper, type):
        return
    for name, module in root.named_modules():
        if module not in ignored_modules and isinstance(module, wrapper):
            raise PlanError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in {type(root).__name__}; pass auto_wrap_policy to the outermost wrapper "
                "only, or wrap all modules by hand"
            )


def _wrap_chosen(
    module: nn.Module,
    chosen: Mapping[nn.Module, dict[str, Any]],
    wrapper: Wrapper,
    wrapped: dict[nn.Module, nn.Module],
) -> None:
    """Wrap the ``chosen`` modules; ``wrapped`` has those that another parent has, too."""
    for name, child in module.named_children():
        if child not in wrapped:
            _wrap_chosen(child, chosen, wrapper, wrapped)
            wrapped[child] = wrapper(child, **chosen[child]) if child in chosen else child
        if child in chosen:
            setattr(module, name, wrapped[child])


def _wrap_recursively(
    module: nn.Module,
    policy: Policy,
    wrap_one: Callable[[nn.Module], nn.Module],
    ignored: tuple[Collection[nn.Module], set[int]],
    *,
    is_root: bool = False,
) -> tuple[nn.Module, int]:
    """Wrap ``module`` if ``policy`` chooses it; return it and its number of wrapped elements."""
    modules, parameters = ignored
    total = sum(p.numel() for p in module.parameters() if id(p) not in parameters)
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return module, 0
    num_wrapped = 0
    for name, child in module.named_children():
        if child not in modules:
            replaced, count = _wrap_recursively(child, policy, wrap_one, ignored)
            setattr(module, name, replaced)
            num_wrapped += count
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=total - num_wrapped):
        return module, num_wrapped
    return wrap_one(module), total
