"""Nested state as JSON and named tensors, and back.

``{"lr": 0.1, "ema": [x]}`` becomes the JSON ``{"lr": 0.1, "ema": [{"$tensor": "ema/0"}]}`` and the
tensor ``ema/0``. Similar marks stand for other types that JSON lacks: tuples, NumPy arrays, and
dicts whose keys are not all strings.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import CheckpointError

__all__ = ["decode", "encode", "tensor_names"]

_ARRAY, _DICT, _TENSOR, _TUPLE = "$array", "$dict", "$tensor", "$tuple"


def encode(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """``value`` as JSON. Its tensors are added to ``tensors`` by their path.

    Raises:
        CheckpointError: it contains something other than data and tensors; names the path.
    """
    encoded: Any
    match value:
        case _ if type(value) in _PLAIN:
            encoded = value
        case Tensor():
            encoded = {_TENSOR: _name(path, value, tensors)}
        case np.ndarray():
            encoded = {_ARRAY: _name(path, _tensor_of(value, path), tensors)}
        case np.generic():
            encoded = encode(value.item(), tensors, path)
        case tuple() | list():
            encoded = [encode(x, tensors, _join(path, i)) for i, x in enumerate(value)]
            encoded = {_TUPLE: encoded} if isinstance(value, tuple) else encoded
        case dict():
            encoded = _encode_dict(value, tensors, path)
        case _:
            raise _error(
                path,
                f"a {type(value).__name__} cannot be saved; expected numbers, strings, tensors, "
                "and lists, tuples and dicts of them, or an object with state_dict()",
            )
    return encoded


def decode(encoded: Any, read: Callable[[str], Tensor]) -> Any:
    """The reverse of `encode`; ``read`` returns a tensor by its name."""
    if isinstance(encoded, list):
        return [decode(x, read) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark, inner = next(iter(encoded.items()), ("", None))
    if not mark.startswith("$"):
        return {key: decode(x, read) for key, x in encoded.items()}
    return _decode_marked(mark, inner, read)


def tensor_names(encoded: Any, path: str = "") -> Iterator[str]:
    """The names of the tensors in a tree that was read from a file.

    Raises:
        ValueError: it is not what `encode` returns; names the path.
    """
    if isinstance(encoded, list):
        for number, item in enumerate(encoded):
            yield from tensor_names(item, _join(path, number))
    elif isinstance(encoded, dict):
        mark, inner = next(iter(encoded.items()), ("", None))
        if not mark.startswith("$"):
            for key, item in encoded.items():
                yield from tensor_names(item, _join(path, key))
        elif len(encoded) == 1 and mark in (_TENSOR, _ARRAY) and isinstance(inner, str):
            yield inner
        elif len(encoded) == 1 and mark == _TUPLE and isinstance(inner, list):
            yield from tensor_names(inner, path)
        elif (
            len(encoded) == 1
            and mark == _DICT
            and isinstance(inner, list)
            and all(map(_is_pair, inner))
        ):
            yield from tensor_names([item for _, item in inner], path)
        else:
            raise ValueError(f"{path}: {mark} is not a mark of this format, or has another value")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_pair(value: Any) -> bool:
    match value:
        case [None | bool() | int() | float() | str(), _]:
            return True
    return False


_PLAIN = (type(None), bool, int, float, str)


def _decode_marked(mark: str, inner: Any, read: Callable[[str], Tensor]) -> Any:
    if mark == _TENSOR:
        return read(inner)
    if mark == _ARRAY:
        return read(inner).numpy()
    if mark == _TUPLE:
        return tuple(decode(x, read) for x in inner)
    assert mark == _DICT, mark
    return {key: decode(x, read) for key, x in inner}


def _encode_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(x, tensors, _join(path, key)) for key, x in value.items()}
    for key in value:
        if type(key) not in _PLAIN:
            raise _error(
                _join(path, key),
                f"a {type(key).__name__} cannot be saved as a key; expected a number or a string",
            )
    return {_DICT: [[key, encode(x, tensors, _join(path, key))] for key, x in value.items()]}


def _name(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = path or "value"
    if name in tensors:
        raise _error(name, "two tensors have this path; rename one of them")
    tensors[name] = tensor
    return name


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """A copy of ``array``, which is often changed in place."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise _error(path, f"an array of {array.dtype} cannot be saved; {error}") from error


def _error(path: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}" if path else reason)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
