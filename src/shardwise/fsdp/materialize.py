"""Modules on the meta device, as FSDP1 fills them: from torch's own generator, in module order."""

from collections.abc import Callable, Collection, Iterable

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
    """Give storage and values to modules in ``module`` that have none.

    Raises:
        PlanError: one has no ``reset_parameters()``, or is still on the meta device after.
    """
    own = {id(parameter) for parameter in ignored}
    for name, inner in list(module.named_modules()):
        if not any(state.is_meta and id(state) not in own for state in _own_states(inner)):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
        else:
            _reset(name, inner, device or torch.get_default_device())
        if any(state.is_meta for state in _own_states(inner)):
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


def _own_states(module: nn.Module) -> Iterable[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
