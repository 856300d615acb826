"""Waits for Gloo that end when this rank closes its connections."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

__all__ = ["GlooWaits"]

_LOOK_SECONDS = 0.1  # between looks whether the connections are closed


class GlooWaits:
    """Has other threads wait for Gloo.

    If a connection is closed while a message is half sent or half received, Gloo wakes neither
    side before its timeout. Another thread waits so long, and the one that calls `wait` does not.
    """

    def __init__(self) -> None:
        self._idle: list[_Waiter] = []

    def wait(self, works: Sequence[dist.Work], is_closed: Callable[[], bool]) -> None:
        """Wait for all ``works``. Several threads may do so at a time.

        Raises:
            ConnectionError: a connection is gone, or ``is_closed`` has become true.
        """
        try:
            waiter = self._idle.pop()
        except IndexError:
            waiter = _Waiter()
        wait = _Wait(works)
        waiter.waits.put(wait)
        while not wait.running.acquire(timeout=_LOOK_SECONDS):
            if is_closed():
                raise ConnectionError("this rank has closed the connection")
        self._idle.append(waiter)
        if wait.error is not None:
            raise ConnectionError(str(wait.error)) from wait.error


class _Waiter:
    """A thread, which ends when this object is freed and its wait is over."""

    def __init__(self) -> None:
        self.waits: SimpleQueue[_Wait | None] = SimpleQueue()
        weakref.finalize(self, self.waits.put, None)
        thread = threading.Thread(
            target=_serve, args=(self.waits,), name="shardwise-gloo", daemon=True
        )
        thread.start()


class _Wait:
    """A wait for ``works``, and its error."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works
        self.error: RuntimeError | None = None
        self.running = threading.Lock()
        self.running.acquire()

    def run(self) -> None:
        self.error = _error_of(self._works)
        # An idle thread keeps no tensor alive, and one that frees a work of Gloo while the
        # interpreter ends aborts the process.
        self._works = ()
        self.running.release()


def _error_of(works: Sequence[dist.Work]) -> RuntimeError | None:
    """Wait for all ``works``, or for the first that raises the error of a connection."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        return error.with_traceback(None)  # which would keep the works
    return None


def _serve(waits: "SimpleQueue[_Wait | None]") -> None:
    while (wait := waits.get()) is not None:
        wait.run()
        del wait
