"""Jobs that run concurrently with the caller, as works of torch.distributed."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["HostWork", "Lanes"]

_IDLE_SECONDS = 5.0  # after which a thread ends; a new one takes 0.2 ms to start
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
        """Make the work of ``job``, called once by `run`, whose result are ``tensors``.

        ``timeout`` is that of a `wait` without one; not positive: none.
        """
        super().__init__()
        self._name = name
        self._job: Callable[[], None] | None = job  # None after it has run
        self._tensors = list(tensors)
        self._limit = timeout
        self._error: Exception | None = None
        self._has_ended = False
        self._running = threading.Lock()  # held until the job has ended, and for moments by waiters
        self._running.acquire()
        self._future_lock = threading.Lock()
        self._over: Future[None] | None = None  # if `get_future` was called

    def run(self) -> Future[None] | None:
        """Run the job, and keep its error for `wait`.

        Returns:
            A future that the caller must complete. Its callbacks may wait for other works.
        """
        assert self._job is not None
        try:
            with torch.inference_mode():  # which may write to inference tensors, and to any others
                self._job()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        self._job = None  # drops the tensors that only the job needs before a waiter continues
        with self._future_lock:
            self._has_ended = True
            self._running.release()
            return self._over

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
        self._raise_error()
        return True

    def is_completed(self) -> bool:
        return self._has_ended

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
            self._raise_error()
            return self._tensors

        with self._future_lock:
            if self._over is None:
                self._over = Future()
                if self._has_ended:
                    self._over.set_result(None)
        return self._over.then(finish)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class Lanes:
    """Runs the works of each lane in order, and those of different lanes concurrently.

    Lanes share threads, which end when they have been idle for some seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for all of the following
        self._waiting: dict[Hashable, deque[HostWork]] = {}  # by lane, if some thread runs it
        self._ready: SimpleQueue[Hashable] = SimpleQueue()  # lanes that need a thread
        self._num_idle = 0  # threads that wait for a lane, without those that have one in `_ready`

    def submit(self, lane: Hashable, work: HostWork) -> None:
        """Run ``work`` on a thread."""
        with self._lock:
            if lane in self._waiting:
                self._waiting[lane].append(work)
            else:
                self._waiting[lane] = deque([work])
                self._find_thread(lane)

    def run(self, lane: Hashable, work: HostWork) -> None:
        """Run ``work`` on this thread if the lane is idle, which saves two switches of threads."""
        with self._lock:
            if lane in self._waiting:
                self._waiting[lane].append(work)
                return
            self._waiting[lane] = deque()
        try:
            work.run()  # it has no future yet
        finally:
            self._leave(lane)

    def _leave(self, lane: Hashable) -> None:
        """Let another thread run the lane, if there are works in it."""
        with self._lock:
            if self._waiting[lane]:
                self._find_thread(lane)
            else:
                del self._waiting[lane]

    def _find_thread(self, lane: Hashable) -> None:
        self._ready.put(lane)
        if self._num_idle:
            self._num_idle -= 1
        else:
            threading.Thread(target=self._work, name="hostccl", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                self._run_lane(self._ready.get(timeout=_IDLE_SECONDS))
            except Empty:
                with self._lock:
                    if self._num_idle:
                        self._num_idle -= 1
                        return

    def _run_lane(self, lane: Hashable) -> None:
        over: Future[None] | None = None
        while over is None:
            with self._lock:
                if not self._waiting[lane]:
                    del self._waiting[lane]
                    self._num_idle += 1
                    return
                work = self._waiting[lane].popleft()
            over = work.run()
            del work  # an idle thread keeps no tensor alive
        self._leave(lane)  # callbacks may wait for works of this lane
        over.set_result(None)
        with self._lock:
            self._num_idle += 1
