"""Nested state as JSON and named tensors, and back.

``{"lr": 0.1, "ema": [x]}`` becomes the JSON ``{"lr": 0.1, "ema": [{"$tensor": "ema/0"}]}`` and the
tensor ``ema/0``. Similar marks encode other types that JSON lacks: tuples, deques, dtypes, NumPy
arrays, Counters, and dicts whose keys are not all strings. Other subclasses of list, tuple and dict
become these.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import CheckpointError

__all__ = ["decode", "encode", "in_order", "tensor_names"]


def encode(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """Encode ``value`` as JSON and add its tensors to ``tensors``, by path.

    A CheckpointError names the path of what is neither data nor a tensor.
    """
    encoded: Any
    match value:
        case _ if type(value) in _PLAIN:
            encoded = value
        case Tensor():
            encoded = {"$tensor": _name(path, value, tensors)}
        case np.ndarray():
            encoded = {"$array": _name(path, _tensor_of(value, path), tensors)}
        case np.generic():
            encoded = encode(value.item(), tensors, path)
        case tuple() | list():
            encoded = [encode(x, tensors, _join(path, i)) for i, x in enumerate(value)]
            encoded = {"$tuple": encoded} if isinstance(value, tuple) else encoded
        case deque():
            encoded = {"$deque": [value.maxlen, encode(list(value), tensors, path)]}
        case torch.dtype():
            encoded = {"$dtype": str(value).removeprefix("torch.")}
        case Counter():
            encoded = {"$counter": encode(dict(value), tensors, path)}
        case dict():
            encoded = _encode_dict(value, tensors, path)
        case _:
            raise _error(
                path,
                f"a {type(value).__name__} cannot be saved; expected numbers, strings, tensors, "
                "and lists, tuples and dicts of them, or an object with state_dict()",
            )
    return encoded


def in_order(encoded: Any) -> Any:
    """``encoded`` with pairs in place of dicts that are not in the order in which JSON sorts them.

    A manifest has sorted keys, but what iterates over a dict may depend on its order.
    """
    if isinstance(encoded, list):
        return [in_order(x) for x in encoded]
    if not isinstance(encoded, dict):
        return encoded
    inner = {key: in_order(x) for key, x in encoded.items()}
    return inner if list(inner) == sorted(inner) else {"$dict": [list(x) for x in inner.items()]}


def decode(encoded: Any, read: Callable[[str], Tensor], path: str = "") -> Any:
    """Decode the result of `encode`; ``read`` returns a tensor by its name.

    A ValueError names the path of what `encode` cannot have returned.
    """
    if isinstance(encoded, list):
        return [decode(x, read, _join(path, i)) for i, x in enumerate(encoded)]
    if not isinstance(encoded, dict):
        return encoded
    mark, inner = next(iter(encoded.items()), ("", None))
    if not mark.startswith("$"):
        return {key: decode(x, read, _join(path, key)) for key, x in encoded.items()}
    if len(encoded) > 1:
        raise ValueError(f"{path}: {mark} is next to another key")
    return _decode_marked(mark, inner, read, path)


def tensor_names(encoded: Any, path: str = "") -> list[str]:
    """The names of the tensors in a tree that was read from a file; errors as in `decode`."""
    names: list[str] = []

    def record(name: str) -> Tensor:
        names.append(name)
        return torch.empty(0)

    decode(encoded, record, path)
    return names


_PLAIN = (type(None), bool, int, float, str)


def _decode_marked(mark: str, inner: Any, read: Callable[[str], Tensor], path: str) -> Any:
    decoded: Any
    match mark, inner:
        case "$tensor", str():
            decoded = read(inner)
        case "$array", str():
            decoded = read(inner).numpy()
        case "$tuple", list():
            decoded = tuple(decode(inner, read, path))
        case "$deque", [None | int() as maxlen, list() as items]:
            decoded = deque(decode(items, read, path), maxlen)
        case "$dtype", str() if isinstance(getattr(torch, inner, None), torch.dtype):
            decoded = getattr(torch, inner)
        case "$counter", dict():
            decoded = Counter(decode(inner, read, path))
        case "$dict", list() if all(map(_is_pair, inner)):
            decoded = {key: decode(x, read, _join(path, key)) for key, x in inner}
        case _:
            raise ValueError(f"{path}: {mark} is not a mark of this format, or has another value")
    return decoded


def _is_pair(value: Any) -> bool:
    match value:
        case [key, _]:
            return type(key) in _PLAIN
    return False


def _encode_dict(value: dict[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(x, tensors, _join(path, key)) for key, x in value.items()}
    for key in value:
        if type(key) not in _PLAIN:
            raise _error(
                _join(path, key),
                f"a {type(key).__name__} cannot be saved as a key; expected a number or a string",
            )
    return {"$dict": [[key, encode(x, tensors, _join(path, key))] for key, x in value.items()]}


def _name(path: str, tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = path or "value"
    if name in tensors:
        raise _error(name, "two tensors have this path; rename one of them")
    tensors[name] = tensor
    return name


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """A copy of ``array``, because programs often change arrays in place."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise _error(path, f"an array of {array.dtype} cannot be saved; {error}") from error


def _error(path: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: {reason}" if path else reason)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
