"""Tensors inside containers, objects, tensor subclasses and attributes of modules."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.structure import HANDLE

__all__ = ["plain_tensors", "tensors_in", "tensors_left_in"]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_FIRST_PARTS = 64
_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, nn.Module)


def tensors_left_in(module: nn.Module, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield tensors in attributes of ``module`` and of its submodules, except in other units.

    Tensors may be buffers, or up to three containers or objects deep in an attribute. Only the
    first parts of a container are searched unless it begins with a tensor: this runs at every call,
    and modules also hold things like vocabularies. ``seen`` has the ids of attributes that were
    searched, as modules may share one configuration.
    """
    seen = set() if seen is None else seen
    yield from (buffer for buffer in module._buffers.values() if buffer is not None)
    for name, value in vars(module).items():
        is_internal = name in _OF_EVERY_MODULE or name.startswith(HANDLE)  # torch's or the engine's
        if not is_internal and id(value) not in seen and not isinstance(value, _LEAVES):
            seen.add(id(value))
            yield from _tensors_within(value, depth=3)
    for child in module.children():
        if HANDLE not in vars(child):
            yield from tensors_left_in(child, seen)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in nested containers, dataclasses and plain objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from tensors_in(part, seen)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield ``tensor``, or the tensors that it wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))


def _tensors_within(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        parts = iter(_parts(value))
        first = next(parts, None)
        if isinstance(first, Tensor):
            yield first
            yield from (part for part in parts if isinstance(part, Tensor))
            return
        for part in (first, *islice(parts, _FIRST_PARTS)):
            if not isinstance(part, _LEAVES):
                yield from _tensors_within(part, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, type):
        return
    elif hasattr(value, "__dict__"):
        if not callable(value) or dataclasses.is_dataclass(value):
            yield from vars(value).values()  # getattr could run a property, which may raise
    elif dataclasses.is_dataclass(value):  # with slots
        yield from (getattr(value, field.name, None) for field in dataclasses.fields(value))
