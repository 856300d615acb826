"""Initialize modules on the meta device as FSDP1 does: one by one, with torch's generator."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError

__all__ = ["materialize"]


@torch.no_grad()
def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device | None,
    ignored: Collection[nn.Parameter],
) -> None:
    """Allocate and initialize the modules in ``module`` that are on the meta device.

    Raises:
        PlanError: a module has no ``reset_parameters()`` and ``param_init_fn`` is None, or
            ``param_init_fn`` is not callable or left a module on the meta device.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise PlanError(f"Expected param_init_fn={param_init_fn!r} to be callable")
    ignored_ids = {id(parameter) for parameter in ignored}
    for name, inner in list(module.named_modules()):
        if all(id(state) in ignored_ids for state in _meta_states(inner)):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
        else:
            _reset(name, inner, device or torch.get_default_device())
        if _meta_states(inner):
            raise PlanError(f"param_init_fn: left {name or 'the root'} on the meta device")


def _reset(name: str, module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise PlanError(
            f"{name or 'the root'}: a {type(module).__name__} on the meta device has no "
            "reset_parameters(); pass param_init_fn"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _meta_states(module: nn.Module) -> list[Tensor]:
    """The module's own parameters and buffers that are on the meta device."""
    states = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [state for state in states if state.is_meta]
