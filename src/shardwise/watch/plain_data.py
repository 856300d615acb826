"""Messages through the job's store, as JSON that is checked when it is read.

Any process that reaches the store can write to it, so nothing that comes from there is executed,
and a value of another form than expected is refused.
"""

import dataclasses
import json
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["decode", "encode"]

T = TypeVar("T")

_MAX_RANGE = 1 << 20  # numbers of ranks are smaller


def encode(message: Any) -> str:
    """Return a dataclass as JSON.

    Mappings become lists of pairs, and evenly spaced numbers, such as the ranks of a group, become
    the arguments of a `range`, so that the size does not grow with the number of ranks.
    """
    return json.dumps(_plain(message), separators=(",", ":"))


def decode(kind: type[T], content: bytes) -> T:
    """Return the ``kind``, a dataclass, that `encode` has written.

    Its fields may be int, str, bool, optional values, tuples, mappings and dataclasses.

    Raises:
        ValueError: the content is not JSON, or has other fields or types.
    """
    try:
        message: T = _read(kind, json.loads(content))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return message


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, tuple) and len(value) > 3 and set(map(type, value)) == {int}:  # noqa: PLR2004
        first, second, *_, last = value
        step = second - first
        is_small = 0 <= first < last < _MAX_RANGE and step > 0
        if is_small and value == tuple(range(first, last + 1, step)):
            return {"range": [first, last + 1, step]}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if hints := _hints(kind):
        _check(isinstance(value, dict) and value.keys() == hints.keys(), kind, value)
        return kind(**{name: _read(hint, value[name]) for name, hint in hints.items()})
    if origin is types.UnionType:  # of a type and None
        return None if value is None else _read(arguments[0], value)
    if origin is None:
        _check(type(value) is kind, kind, value)
        return value
    if isinstance(value, dict) and arguments == (int, ...):
        return _numbers(value.get("range"))
    _check(isinstance(value, list), kind, value)
    if origin is Mapping:
        pairs = [_read(types.GenericAlias(tuple, arguments), pair) for pair in value]
        return dict(pairs)
    kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
    _check(len(value) == len(kinds), kind, value)
    return tuple(map(_read, kinds, value))


def _numbers(value: Any) -> tuple[int, ...]:
    start, stop, step = _read(tuple[int, int, int], value)
    _check(0 <= start < stop <= _MAX_RANGE and step > 0, range, value)
    return tuple(range(start, stop, step))


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of the fields of a dataclass; empty for other types."""
    return get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}


def _check(fits: bool, kind: Any, value: Any) -> None:
    if not fits:
        raise ValueError(f"expected {kind}, got {str(value)[:80]}")
