"""The job's store, whose calls end even if the process that holds it does not answer."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.distributed_c10d import Store

from shardwise.comm.device import ThreadStream
from shardwise.errors import PeerLost, PeerSilent

if TYPE_CHECKING:
    from shardwise.comm.api import Work

__all__ = ["BoundedStore"]

_T = TypeVar("_T")

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
