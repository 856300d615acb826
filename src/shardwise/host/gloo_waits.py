"""Waits for Gloo that end when this rank closes its connections."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch.distributed as dist

__all__ = ["GlooWaits"]

_LOOK_SECONDS = 0.1  # between looks whether the connections are closed


class GlooWaits:
    """Waits on a thread of its own, which ends when this object is freed.

    If a connection is closed while a message is half sent or half received, Gloo wakes neither
    side before its timeout. That thread waits so long, and the one that calls `wait` does not.
    """

    def __init__(self) -> None:
        self._waits: SimpleQueue[_Wait | None] = SimpleQueue()
        weakref.finalize(self, self._waits.put, None)
        thread = threading.Thread(
            target=_serve, args=(self._waits,), name="shardwise-gloo", daemon=True
        )
        thread.start()

    def wait(self, works: Sequence[dist.Work], is_closed: Callable[[], bool]) -> None:
        """Wait for all ``works``.

        Raises:
            ConnectionError: a connection is gone, or ``is_closed`` has become true.
        """
        wait = _Wait(works)
        self._waits.put(wait)
        while not wait.running.acquire(timeout=_LOOK_SECONDS):
            if is_closed():
                raise ConnectionError("this rank has closed the connection")
        if wait.error is not None:
            raise ConnectionError(str(wait.error)) from wait.error


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
