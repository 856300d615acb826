"""Tensors inside containers, objects, tensor subclasses and attributes of modules."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.structure import HANDLE, own_modules

__all__ = [
    "change_tensors",
    "change_tensors_left_in",
    "plain_tensors",
    "tensors_in",
    "tensors_left_in",
    "tensors_within",
]

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_FIRST_PARTS = 64
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
_LEAVES = (*_PLAIN, nn.Module)
_IS_PLAIN = frozenset(_PLAIN)  # of an exact type; five times as fast as `isinstance`


def tensors_left_in(module: nn.Module) -> list[Tensor]:
    """Find tensors in attributes of ``module`` and of its submodules, except in other units.

    Tensors may be buffers, or up to three containers or objects deep in an attribute. Only the
    first parts of a container are searched unless it begins with a tensor: this runs at every call,
    and modules also hold things like vocabularies.
    """
    found: list[Tensor] = []
    seen: set[int] = set()  # ids of attributes, as modules may share one configuration
    for inner in own_modules(module):
        found += [buffer for buffer in inner._buffers.values() if buffer is not None]
        for name, value in vars(inner).items():
            if name in _OF_EVERY_MODULE or type(value) in _IS_PLAIN or id(value) in seen:
                continue
            if not (name.startswith(HANDLE) or isinstance(value, nn.Module)):
                seen.add(id(value))
                found += tensors_within(value)
    return found


def change_tensors_left_in(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply ``change`` to the tensors that `tensors_left_in` finds."""
    for inner in own_modules(module):
        buffers = {name: one for name, one in inner._buffers.items() if one is not None}
        inner._buffers.update({name: change(one) for name, one in buffers.items()})
        for name, value in list(vars(inner).items()):
            if name not in _OF_EVERY_MODULE and not name.startswith(HANDLE):
                vars(inner)[name] = change_tensors(value, change)


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


def change_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to the tensors that `tensors_in` finds.

    Lists, mappings and objects stay the same objects.

    Raises:
        TypeError: a container or an object does not let its tensors be replaced.
    """
    return _changed(value, change, {})


def _changed(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _LEAVES) or id(value) in done:
        return done.get(id(value), value)
    done[id(value)] = value
    parts = list(_parts(value))
    changed = [_changed(part, change, done) for part in parts]
    if all(new is old for new, old in zip(changed, parts, strict=True)):
        return value
    if isinstance(value, (tuple, set, frozenset)):
        kind: Any = type(value)
        done[id(value)] = kind._make(changed) if hasattr(kind, "_make") else kind(changed)
        return done[id(value)]
    for key, new in zip(_keys(value), changed, strict=True):
        if isinstance(value, (Mapping, list)):
            value[key] = new  # type: ignore[index]
        else:
            object.__setattr__(value, key, new)  # the class may be frozen
    return value


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield ``tensor``, or the tensors that it wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):  # a DTensor names its mesh, too
            yield from plain_tensors(part)


def tensors_within(value: Any, depth: int = 3) -> list[Tensor]:
    """Find tensors that are up to ``depth`` containers or objects deep, as `tensors_left_in`."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if depth:
        parts = iter(_parts(value))
        first = next(parts, None)
        if isinstance(first, Tensor):
            return [first, *(part for part in parts if isinstance(part, Tensor))]
        for part in (first, *islice(parts, _FIRST_PARTS)):
            if not (type(part) in _IS_PLAIN or isinstance(part, _LEAVES)):
                found += tensors_within(part, depth - 1)
    return found


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (dict, Mapping)):  # the check for a Mapping is slow
        return value.values()
    if isinstance(value, type):
        return ()
    if hasattr(value, "__dict__"):
        is_searched = not callable(value) or dataclasses.is_dataclass(value)
        # getattr could run a property, which may raise
        return vars(value).values() if is_searched else ()
    if dataclasses.is_dataclass(value):  # with slots
        return [getattr(value, name, None) for name in _field_names(value)]
    return ()


def _keys(value: Any) -> list[Any]:
    """The keys, indices or attributes of `_parts`."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, list):
        return list(range(len(value)))
    return list(vars(value)) if hasattr(value, "__dict__") else _field_names(value)


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]
