"""Casts of the inputs and outputs of units, and copies of inputs to the device."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from shardwise import _private
from shardwise._private import pytree

__all__ = ["cast_tensors", "move_tensors"]


def cast_tensors(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with all floating-point tensors in containers and dataclasses cast.

    Those in which a tensor is cast are copied. All others stay the same objects, so that a list to
    which a module appends is the caller's.
    """

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _with_changed(values, cast, {})


def _with_changed(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    """``value``, or a copy with changed tensors. ``done`` has the results for objects, by id."""
    if isinstance(value, Tensor):
        return change(value)
    # The function must not refer to ``value``: torch leaves it in a cycle of references, which
    # would keep tensors alive until the garbage collector runs.
    own = id(value)
    parts, spec = pytree.tree_flatten(value, is_leaf=lambda part: id(part) != own)
    if any(part is value for part in parts):  # no container that torch knows
        if id(value) not in done:
            done[id(value)] = value  # it may contain itself
            done[id(value)] = _with_changed_object(value, change, done)
        return done[id(value)]
    changed = [_with_changed(part, change, done) for part in parts]
    is_same = all(new is old for new, old in zip(changed, parts, strict=True))
    return value if is_same else pytree.tree_unflatten(changed, spec)


def _with_changed_object(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]
) -> Any:
    """The same for a dataclass or for a class derived from dict; others are not searched."""
    if isinstance(value, dict):
        before = dict(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        names = [field.name for field in dataclasses.fields(value)]
        if hasattr(value, "__dict__"):  # getattr could run a property, which may raise
            before = {name: part for name, part in vars(value).items() if name in names}
        else:
            before = {name: getattr(value, name) for name in names}
    else:
        return value
    after = {key: _with_changed(part, change, done) for key, part in before.items()}
    changed = {key: part for key, part in after.items() if part is not before[key]}
    if not changed:
        return value
    twin = copy.copy(value)
    for key, part in changed.items():
        if isinstance(twin, dict):
            twin[key] = part
        else:
            object.__setattr__(twin, key, part)  # the class may be frozen
    return twin


def move_tensors(values: Any, device: torch.device) -> Any:
    """Return ``values`` with all CPU tensors in its containers copied to ``device``.

    The host does not wait for copies from pinned memory. ``values`` itself if nothing is copied.
    """
    leaves = pytree.tree_leaves(values)
    if not any(isinstance(leaf, Tensor) and _is_on_cpu(leaf) for leaf in leaves):
        return values

    def move(leaf: Any) -> Any:
        data = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if not (isinstance(data, Tensor) and _is_on_cpu(data)):
            return leaf
        # Of what torch.vmap passes, it cannot be asked.
        is_pinned = not _private.is_transformed_by_functorch() and data.is_pinned()
        return leaf.to(device, non_blocking=is_pinned)

    # A PackedSequence keeps its sizes on the CPU.
    return pytree.tree_map(move, values, is_leaf=lambda node: isinstance(node, PackedSequence))


def _is_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
