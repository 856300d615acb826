"""Jobs that run concurrently with the caller, as works of torch.distributed."""

import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["HostWork", "Lanes"]

_IDLE_SECONDS = 5.0  # after which the thread of a lane ends; a new one takes 0.2 ms to start
_NO_TIMEOUT = timedelta(0)


class HostWork(dist.Work):
    """A job, its result and its error.

    C++ code calls `wait` and `get_future`; the other methods are for Python.
    """

    def __init__(
        self,
        name: str,
        job: Callable[[], None],
        tensors: Sequence[Tensor],
        timeout: timedelta = _NO_TIMEOUT,
    ) -> None:
        """
        Args:
            name: for messages.
            job: called once by `run`.
            tensors: the result.
            timeout: of `wait`, if that is called without one; not positive: none.
        """
        super().__init__()
        self._name = name
        self._job: Callable[[], None] | None = job  # None after it has run
        self._tensors = list(tensors)
        self._limit = timeout
        self._error: Exception | None = None
        self._over: Future[None] = Future()
        self._running = threading.Lock()  # held until the job has ended
        self._running.acquire()

    def run(self) -> None:
        """Run the job, and keep its error for `wait`."""
        assert self._job is not None
        try:
            with torch.inference_mode():  # which may write to inference tensors, and to any others
                self._job()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._job = None  # drops the tensors that only the job needs before a waiter continues
        self._running.release()
        self._over.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True when the job has ended.

        Raises:
            TimeoutError: it has not ended after ``timeout``.
            Exception: its error, such as `RankLostError`.
        """
        limit = timeout if timeout > _NO_TIMEOUT else self._limit
        seconds = limit.total_seconds() if limit > _NO_TIMEOUT else -1
        if not self._running.acquire(timeout=seconds):
            raise TimeoutError(f"{self._name} has not ended after {seconds} s")
        self._running.release()  # for other waiters
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return not self._running.locked()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors, or of the error.

        The error passes through a callback, since code in C++ takes an exception that is set with
        `Future.set_exception` for a result.
        """

        def finish(_over: Future[None]) -> list[Tensor]:
            self.wait()
            return self._tensors

        return self._over.then(finish)


class Lanes:
    """Runs the works of each lane in order, and those of different lanes concurrently.

    A lane has a thread while there are works, and for some seconds after the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[Hashable, SimpleQueue[HostWork]] = {}  # of lanes with a thread

    def submit(self, lane: Hashable, work: HostWork) -> None:
        with self._lock:
            if lane in self._queues:
                self._queues[lane].put(work)
                return
            queue = self._queues[lane] = SimpleQueue()
            queue.put(work)
        name = f"hostccl-{lane}"
        threading.Thread(target=self._run, args=(lane, queue), name=name, daemon=True).start()

    def _run(self, lane: Hashable, queue: "SimpleQueue[HostWork]") -> None:
        while True:
            try:
                work = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if not queue.empty():
                        continue
                    del self._queues[lane]
                    return
            work.run()
            del work  # an idle lane keeps no tensor alive
