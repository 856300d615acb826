"""Devices and buffers of FSDP1 modules; as in FSDP1, ignored modules are left alone."""

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from shardwise.fsdp.names import clean_name

__all__ = ["buffer_dtypes", "left_alone", "move"]


def move(
    root: nn.Module,
    device: torch.device,
    ignored_modules: Collection[nn.Module],
    ignored_params: Collection[nn.Parameter],
) -> None:
    """Move the parameters and buffers of ``root`` to ``device``, except for ignored ones."""
    ignored = {id(parameter) for parameter in ignored_params}

    def moves(tensor: Tensor) -> bool:
        return tensor.device != device and id(tensor) not in ignored

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device) if moves(tensor) else tensor

    for module in root.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        # Otherwise the tensors must stay the same objects.
        if module not in ignored_modules and any(map(moves, own)):
            module._apply(to_device, recurse=False)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def left_alone(modules: Collection[nn.Module]) -> Iterator[None]:
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
