"""Which modules become units: FSDP1's policies, and wrapping by hand.

Policies are called ``policy(module=, recurse=, nonwrapped_numel=)``: with ``recurse=True`` on the
way down ("look inside?") and with ``recurse=False`` on the way up ("wrap it?", given the elements
that nothing inside it holds). They do as ``units=`` of `shardwise.fully_shard`, too.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import nn

from shardwise.errors import PlanError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
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


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:  # noqa: ARG001
    """Every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Modules for which ``lambda_fn`` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Modules of the classes ``transformer_layer_cls``."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Modules with ``min_num_params`` elements or more that nothing inside them holds.

    Args:
        module: asked about.
        recurse: on the way down.
        nonwrapped_numel: elements.
        min_num_params: elements.
        force_leaf_modules: classes to look inside of never; None for attention, which reads the
            weights of its children without calling them.
        exclude_wrap_modules: classes to wrap never; None for lists and dicts of modules.
    """
    is_large = nonwrapped_numel >= min_num_params
    leaves = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return is_large and not isinstance(module, tuple(leaves if recurse else excluded))


FORCE_LEAF_MODULES = frozenset({nn.MultiheadAttention})
EXCLUDE_WRAP_MODULES = frozenset({nn.ModuleList, nn.ModuleDict})
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = set(FORCE_LEAF_MODULES)  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = set(EXCLUDE_WRAP_MODULES)  # type: ignore[attr-defined]
default_auto_wrap_policy = size_based_auto_wrap_policy  # its name of before torch 1.12


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,  # noqa: ARG001
    module_classes: Collection[type[nn.Module]],
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Policy]
) -> bool:
    """Modules that any of ``policies`` chooses."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


class ModuleWrapPolicy:
    """Modules of some classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = tuple(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({set(self._classes)})"

    def options_of(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Those that differ from the root's; None if ``module`` is not to be wrapped."""
        return {} if isinstance(module, self._classes) else None


class CustomPolicy:
    """Modules for which a function gives True, or the options in which they differ from the root.

    Raises:
        ValueError: it gives neither a bool nor a dict.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._function = lambda_fn

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:
        return recurse or self.options_of(module) is not None

    def options_of(self, module: nn.Module) -> Mapping[str, Any] | None:
        """Those that differ from the root's; None if ``module`` is not to be wrapped."""
        chosen = self._function(module)
        if not isinstance(chosen, (dict, bool)):
            raise ValueError(  # noqa: TRY004 (as FSDP1 has it)
                f"the function of CustomPolicy: expected True, False or a dict, got {chosen!r}"
            )
        if not chosen:
            return None
        return chosen if isinstance(chosen, dict) else {}


_wrapping: ContextVar[tuple[Wrapper, dict[str, Any]] | None] = ContextVar("wrapping", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Wrapper, **wrapper_kwargs: Any) -> Iterator[None]:
    """Within it, `wrap` makes a ``wrapper_cls`` of modules, with ``wrapper_kwargs``.

    Raises:
        NotImplementedError: inside another one.
    """
    if _wrapping.get() is not None:
        raise NotImplementedError("enable_wrap inside enable_wrap: leave the first one before")
    token = _wrapping.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped, inside of `enable_wrap`; otherwise as it is."""
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    wrapper, options = wrapping
    return wrapper(module, **{**options, **wrap_overrides})


def wrap_children(
    root: nn.Module,
    policy: Any,
    wrapper: Wrapper,
    options: Mapping[str, Any],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Put what ``policy`` chooses inside ``root`` into wrappers, the innermost first.

    Raises:
        PlanError: something inside is wrapped already.
    """
    _check_none_wrapped(root, wrapper, ignored_modules)
    if isinstance(policy, (ModuleWrapPolicy, CustomPolicy)):
        # All are asked before any is wrapped, in module order.
        chosen = {
            module: policy.options_of(module)
            for module in root.modules()
            if module is not root and module not in ignored_modules
        }
        _wrap_chosen(root, chosen, wrapper, options)
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
                f"{name or 'the root'} is wrapped already; either wrap by hand, or pass "
                "auto_wrap_policy to the outermost wrapper alone"
            )


def _wrap_chosen(
    module: nn.Module,
    chosen: Mapping[nn.Module, Mapping[str, Any] | None],
    wrapper: Wrapper,
    options: Mapping[str, Any],
) -> None:
    for name, child in module.named_children():
        _wrap_chosen(child, chosen, wrapper, options)
        own = chosen.get(child)
        if own is not None:
            setattr(module, name, wrapper(child, **{**options, **own}))


def _wrap_recursively(
    module: nn.Module,
    policy: Policy,
    wrapper: Wrapper,
    options: Mapping[str, Any],
    ignored: tuple[Collection[nn.Module], set[int]],
    *,
    is_root: bool = False,
) -> tuple[nn.Module, int]:
    """``module``, wrapped if it is to be, and how many elements are wrapped now."""
    modules, parameters = ignored
    total = sum(p.numel() for p in module.parameters() if id(p) not in parameters)
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return module, 0
    taken = 0
    for name, child in module.named_children():
        if child not in modules:
            replaced, count = _wrap_recursively(child, policy, wrapper, options, ignored)
            setattr(module, name, replaced)
            taken += count
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=total - taken):
        return module, taken
    return wrapper(module, **options), total
