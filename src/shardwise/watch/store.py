"""The job's store, whose calls end even if the process that holds it does not answer.

Messages in it are JSON that is checked when it is read. Any process that reaches the store can
write to it, so nothing that comes from there is executed, and a value of another form than expected
is refused.
"""

import dataclasses
import json
import logging
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from torch.distributed.distributed_c10d import Store

from shardwise.comm.device import ThreadStream
from shardwise.errors import PeerLost, PeerSilent

if TYPE_CHECKING:
    from shardwise.comm.api import Work

__all__ = ["BoundedStore", "decode", "encode"]

_T = TypeVar("_T")

_MAX_RANGE = 1 << 20  # numbers of ranks are smaller
_WAITS = 5  # of one call, before it is given up

_log = logging.getLogger("shardwise")


class BoundedStore:
    """A connection to the job's store. Every call raises PeerLost after at most ``seconds``.

    A client of TCPStore waits without a limit for the answer of a process that was stopped or of a
    host that was cut off. So calls run on a thread. A slow answer is logged and awaited.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store: Any = store  # whose stubs lack methods, and types of arguments
        self._seconds = seconds
        self._stream = ThreadStream("shardwise-store")
        self._thread = 0  # of the stream
        self._late: Work | None = None  # a call that was given up

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._call(lambda: self._store.set(key, value))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which begins at 0; return its new value."""
        total: int = self._call(lambda: self._store.add(key, number))
        return total

    def set_if(self, key: str, expected: bytes | str, value: str) -> bytes:
        """Set ``key`` if it has the ``expected`` value, "" for a new one; return its value then."""
        content: bytes = self._call(lambda: self._store.compare_set(key, expected, value))
        return content

    def peek(self, key: str) -> bytes:
        """Return what ``key`` has, b"" if it is new, in one call that does not wait for it."""
        return self.set_if(key, "", "")

    def has(self, *keys: str) -> bool:
        """Whether all ``keys`` have been set."""
        found: bool = self._call(lambda: self._store.check(list(keys)))
        return found

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return what each of ``keys`` has, b"" for new ones; in two calls if there are none."""
        if not self.has(*keys):
            return [self.peek(key) for key in keys]
        contents: list[bytes] = self._call(lambda: self._store.multi_get(list(keys)))
        return contents

    def _call(self, function: Callable[[], _T]) -> _T:
        if threading.get_ident() == self._thread:  # the garbage collector runs there
            return function()
        answers: list[_T] = []

        def run() -> None:
            self._thread = threading.get_ident()
            answers.append(function())

        if self._late is not None and not self._late.done:
            raise self._unreachable
        work = self._stream.submit(run)
        # Not measured by the clock: this process may have been stopped, too.
        for number in range(1, _WAITS + 1):
            if work.wait(self._seconds / _WAITS):
                break
            waited = number * self._seconds / _WAITS
            _log.warning("the job's store has not answered for %.1f s", waited)
        else:
            self._late = work
            raise self._unreachable
        if isinstance(work.error, RuntimeError):
            reason, *_ = str(work.error).splitlines() or [""]  # without the stack of C++
            raise PeerLost(
                f"the process that holds the job's store is gone: {reason}"
            ) from work.error
        if work.error is not None:
            raise work.error
        return answers[0]

    @property
    def _unreachable(self) -> PeerSilent:
        return PeerSilent(
            f"no answer for {self._seconds:.0f} s from the process that holds the job's store: it "
            "is stopped, or its machine or this one is off the network"
        )


def encode(message: Any) -> str:
    """Return a dataclass as JSON.

    Mappings become lists of pairs, and evenly spaced numbers, such as the ranks of a group, become
    the arguments of a `range`, so that the size does not grow with the number of ranks.
    """
    return json.dumps(_plain(message), separators=(",", ":"))


def decode(kind: type[_T], content: bytes) -> _T:
    """Return the ``kind``, a dataclass, that `encode` has written.

    Its fields may be int, str, bool, optional values, tuples, mappings and dataclasses.

    Raises:
        ValueError: the content is not JSON, or has other fields or types.
    """
    try:
        message: _T = _read(kind, json.loads(content))
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
