"""Parameters and buffers of a module before it is sharded; as in FSDP1, ignored ones stay as is."""

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.fsdp.names import clean_name

__all__ = ["buffer_dtypes", "materialize", "move", "preserved_buffers"]


@torch.no_grad()
def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device | None,
    ignored: set[nn.Parameter],
) -> None:
    """Allocate and initialize the modules in ``module`` that are on the meta device, one by one."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise PlanError(f"Expected param_init_fn={param_init_fn!r} to be callable")
    for name, inner in list(module.named_modules()):
        if all(state in ignored for state in _meta_states(inner)):
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
    return [state for state in _own_states(module) if state.is_meta]


def _own_states(module: nn.Module) -> tuple[Tensor, ...]:
    """The parameters and buffers of ``module``, without those of its children."""
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))


def move(
    root: nn.Module,
    device: torch.device,
    ignored_modules: Collection[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Move the parameters and buffers of ``root`` to ``device``, except for ignored ones."""

    def moves(tensor: Tensor) -> bool:
        return tensor.device != device and tensor not in ignored_params

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device) if moves(tensor) else tensor

    for module in root.modules():
        # Otherwise the tensors must stay the same objects.
        if module not in ignored_modules and any(map(moves, _own_states(module))):
            module._apply(to_device, recurse=False)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def preserved_buffers(modules: Collection[nn.Module]) -> Iterator[None]:
    """Restore the buffers of ``modules`` at the end of the block."""
    before = [(module, dict(module._buffers)) for module in modules]
    yield
    for module, buffers in before:
        module._buffers.update(buffers)


def buffer_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the buffers of ``root`` by name, from before wrappers cast them."""
    dtypes = {clean_name(name): buffer.dtype for name, buffer in root.named_buffers()}
    for path, module in root.named_modules():
        for name, dtype in module.__dict__.get("_buffer_dtypes", {}).items():
            dtypes[clean_name(f"{path}.{name}" if path else name)] = dtype
    return dtypes
