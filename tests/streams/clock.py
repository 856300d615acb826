"""Timelines with vector clocks: the host, and the streams of a simulated device.

An operation happens before another one if the clock of the second has reached the number of the
first. Clocks advance by waiting: a stream's clock includes that of the host at each launch, and the
operations before the events that it waited for; the host's includes those it synchronized with.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Clock", "ConcurrentStream", "Event", "Stream", "Timeline", "World"]

Clock = dict[int, int]  # the number of operations of each timeline, by its number


class Timeline:
    """Operations that run in order."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {number: 0}

    def __repr__(self) -> str:
        return self.name

    def advance(self) -> int:
        """Return the number of a new operation."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def join(self, clock: Clock) -> None:
        """Order all operations up to ``clock`` before later ones of this timeline."""
        for number, reached in clock.items():
            if self.clock.get(number, 0) < reached:
                self.clock[number] = reached


class World(Protocol):
    """The part of the simulation that streams and events use."""

    host: Timeline

    def current_stream(self, device: torch.device | None = None) -> "Stream": ...

    def enter(self, stream: "Stream") -> None: ...

    def leave(self, stream: "Stream") -> None: ...

    def block_host(self, stream: "Stream", clock: Clock, position: int, reason: str) -> None: ...


class Stream(Timeline):
    """A queue of the device, with the interface of `torch.Stream` and `torch.cuda.Stream`.

    If it is late, its operations run only when something waits for them.
    """

    def __init__(
        self, world: World, device: torch.device, number: int, name: str, *, is_late: bool
    ) -> None:
        super().__init__(number, name)
        self.device = device
        self.is_late = is_late
        self._world = world
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_begun = 0
        self.num_ended = 0

    @property
    def position(self) -> int:
        """The number of jobs that were queued."""
        return self._num_begun + len(self._jobs)

    def queue(self, job: Callable[[], None]) -> None:
        """Run ``job`` when something waits for it."""
        self._jobs.append(job)

    def run_until(self, position: int) -> None:
        """Run the queued jobs, up to ``position``."""
        while self._num_begun < position:
            job = self._jobs.popleft()
            self._num_begun += 1
            job()
            self.num_ended += 1

    def close(self) -> None:
        """Called when no more jobs will be queued."""

    def wait_event(self, event: "Event") -> None:
        if event.stream is None:
            return  # as in CUDA, an event that was not recorded has completed
        self.join(event.clock)
        if event.stream is self:
            return
        run = partial(event.stream.run_until, event.position)
        if self.is_late:
            self.queue(run)
        else:
            run()

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        recorded = Event(self._world) if event is None else event
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        self._world.block_host(self, self.clock, self.position, "stream.synchronize")

    def query(self) -> bool:
        return self.num_ended == self.position

    def __enter__(self) -> "Stream":
        self._world.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: "TracebackType | None",
    ) -> None:
        self._world.leave(self)


class ConcurrentStream(Stream):
    """A stream that runs its jobs on a separate thread, immediately."""

    def __init__(self, world: World, device: torch.device, number: int, name: str) -> None:
        super().__init__(world, device, number, name, is_late=True)
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_given = 0
        self._progress = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def position(self) -> int:
        return self._num_given

    def queue(self, job: Callable[[], None]) -> None:
        self._num_given += 1
        self._given.put(job)

    def run_until(self, position: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self.num_ended >= position)

    def close(self) -> None:
        """End the thread after the last job."""
        self._given.put(None)

    def _run(self) -> None:
        while (job := self._given.get()) is not None:
            job()
            with self._progress:
                self.num_ended += 1
                self._progress.notify_all()


class Event:
    """A snapshot of a stream's clock, with the interface of `torch.Event`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.stream: Stream | None = None
        self.clock: Clock = {}
        self.position = 0  # number of jobs of the stream before it

    def record(self, stream: Stream | None = None) -> None:
        self.stream = self._world.current_stream() if stream is None else stream
        self.stream.join(self._world.host.clock)
        self.clock = dict(self.stream.clock)
        self.position = self.stream.position

    def wait(self, stream: Stream | None = None) -> None:
        (self._world.current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self._world.block_host(self.stream, self.clock, self.position, "event.synchronize")

    def query(self) -> bool:
        return self.stream is None or self.position <= self.stream.num_ended

    def elapsed_time(self, other: "Event") -> float:  # noqa: ARG002
        return 0.0
