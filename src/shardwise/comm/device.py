"""Devices and streams: all differences between accelerators and the CPU.

A `CommStream` runs jobs in order, concurrently with the caller, and returns a `Work` for each. On
an accelerator it is a stream of the device and a work holds an event, so the host never blocks. On
the CPU it is a thread: Gloo's point-to-point works can be neither polled nor chained, so a thread
other than the computing one waits for them. (Handing a job over costs little compared with the 1 to
1.6 ms of a small exchange.)
"""

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from shardwise.comm.api import CollectiveId, Work

__all__ = [
    "KINDS",
    "NO_TIME",
    "ON_HOST",
    "Accelerator",
    "CommStream",
    "Device",
    "DeviceStream",
    "DeviceWork",
    "ThreadStream",
    "copy_",
    "copy_scaled_",
    "device_of",
    "is_accelerator",
    "join_streams",
    "keeping_random_states",
    "make_current",
    "note_stream",
    "own_device",
    "random_states",
    "run_together",
    "seed_generators",
    "set_random_states",
    "wait_for_device",
]

ON_HOST = ("cpu", "meta")
NO_TIME = math.nan  # of what was not timed
# Devices return the time between events as float32 milliseconds, which after an hour is precise to
# 1/4 ms only. So times are measured from an origin that is renewed after this many seconds.
_ORIGIN_SECONDS = 10.0
# By device, the streams on which a program has computed with the engine's memory: one, or several
# if it runs units on streams of its own. (Torch's streams come from a pool of 32.)
_used_streams: dict[torch.device, list[torch.Stream]] = {}
_CACHED_ELEMENTS = 1 << 17  # a copy of this size stays in the processor's cache


# -- devices -------------------------------------------------------------------------------------


class Device:
    """A `torch.device` and its streams. The CPU has none: calls take effect immediately."""

    is_accelerator = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def new_stream(self) -> Any:
        """Create a stream that runs concurrently with the current one."""

    def current_stream(self) -> Any:
        """Return the current stream of the calling thread."""

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Make ``stream`` the current one within a ``with``."""
        return contextlib.nullcontext()

    def record(self, stream: Any) -> SupportsFloat:
        """Record an event on ``stream`` that others can wait for."""
        return self.record_time(stream)

    def record_time(self, stream: Any) -> SupportsFloat:  # noqa: ARG002
        """Record an event on ``stream`` that also tells when it completed.

        That is ``float(event)``, in seconds of `time.perf_counter`; the host waits.
        """
        return time.perf_counter()

    def wait(self, stream: Any, event: SupportsFloat) -> None:
        """Make later work on ``stream`` wait for ``event``."""

    def synchronize(self, event: SupportsFloat) -> None:
        """Make the host wait until ``event`` has completed."""

    def is_over(self, event: SupportsFloat) -> bool:  # noqa: ARG002
        """Whether ``event`` has completed."""
        return True


class Accelerator(Device):
    """A device with streams (CUDA, ROCm, XPU), through torch's common interface."""

    is_accelerator = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        event = torch.Event(device, enable_timing=True)
        event.record(self.current_stream())
        event.synchronize()
        self._origin = TimedEvent(event, seconds=time.perf_counter())
        self._renewed = time.perf_counter()

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.torch_device, priority=-1)

    def current_stream(self) -> torch.Stream:
        return self.current_stream_of(self.torch_device)

    @staticmethod
    def current_stream_of(device: torch.device) -> torch.Stream:
        """The calling thread's stream of ``device``, which may not be the current device."""
        return torch.accelerator.current_stream(device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
        return stream

    def record(self, stream: torch.Stream) -> "StreamEvent":
        event = torch.Event(self.torch_device)
        event.record(stream)
        return StreamEvent(event)

    def record_time(self, stream: torch.Stream) -> "TimedEvent":
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        recorded = TimedEvent(event, self._origin)
        now = time.perf_counter()
        if now - self._renewed > _ORIGIN_SECONDS and self.is_over(self._origin):
            float(self._origin)  # drops its reference to the previous origin
            self._origin, self._renewed = recorded, now
        return recorded

    def wait(self, stream: torch.Stream, event: Any) -> None:
        stream.wait_event(event.event)

    def synchronize(self, event: Any) -> None:
        event.event.synchronize()

    def is_over(self, event: Any) -> bool:
        # What ran on the host, such as a communication hook, has its time already.
        return isinstance(event, float) or bool(event.event.query())


class StreamEvent:
    """An event of a stream, whose time is not known."""

    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def __float__(self) -> float:
        return NO_TIME


class TimedEvent(StreamEvent):
    """An event of a stream; its time is measured from ``origin``, when it has completed."""

    def __init__(
        self, event: torch.Event, origin: "TimedEvent | None" = None, seconds: float = 0.0
    ) -> None:
        super().__init__(event)
        self._origin = origin
        self._seconds = seconds

    def __float__(self) -> float:
        if self._origin is not None:
            began = float(self._origin)  # after which the origin has completed
            if not self.event.query():
                self.event.synchronize()
            self._seconds = began + self._origin.event.elapsed_time(self.event) / 1e3
            self._origin = None
        return self._seconds


KINDS: dict[str, type[Device]] = {"cpu": Device, "meta": Device}  # all others: `Accelerator`


def device_of(device: torch.device) -> Device:
    """Return the `Device` of ``device``."""
    return KINDS.get(device.type, Accelerator)(device)


def wait_for_device(device: torch.device) -> None:
    """Make the host wait for the work that the calling thread has queued on ``device``."""
    here = device_of(device)
    here.synchronize(here.record(here.current_stream()))


def note_stream(device: torch.device) -> None:
    """Note that the engine's memory is used on the current stream, for `join_streams`."""
    if is_accelerator(device):
        used, current = _used_streams.setdefault(device, []), _current_stream(device)
        if current not in used:
            used.append(current)


def join_streams(device: torch.device, *, mutually: bool = False) -> None:
    """Make later work on the current stream wait for all streams that `note_stream` has noted.

    With ``mutually``, later work on these also waits for the current one, so that a stream may get
    the memory which the current one frees.
    """
    used = _used_streams.get(device)
    if used:
        current = _current_stream(device)
        others = [stream for stream in used if stream != current]
        for stream in others:
            current.wait_stream(stream)
        for stream in others if mutually else ():
            stream.wait_stream(current)


def _current_stream(device: torch.device) -> torch.Stream:
    kind = KINDS.get(device.type, Accelerator)
    assert issubclass(kind, Accelerator)
    return kind.current_stream_of(device)


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` has streams, and memory of its own."""
    return KINDS.get(device.type, Accelerator).is_accelerator


# -- streams -------------------------------------------------------------------------------------


class ThreadStream:
    """Runs jobs on a separate thread, which ends when the stream is freed."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        worker = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None)
        worker.start()

    def submit(self, job: Callable[[], None], collective: CollectiveId | None = None) -> Work:
        work = Work(collective, job)
        self._jobs.put(work)
        return work


class DeviceWork(Work):
    """Work of a `DeviceStream`: for the host, it is done as soon as it is queued."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def wait(self, timeout_seconds: float = -1) -> bool:  # noqa: ARG002 - the host never waits
        # Also after an error: kernels that it queued use memory that may be freed now.
        self._device.wait(self._device.current_stream(), self.times[1])
        return True

    def wait_on_device(self) -> None:
        """Make the current stream wait for this work, or raise its error."""
        if self.error is not None:
            raise self.error
        self.wait()

    def synchronize(self) -> None:
        """Return when the host may read the results, or raise the error."""
        if self.error is not None:
            raise self.error
        self._device.synchronize(self.times[1])

    @property
    def is_over(self) -> bool:
        """Whether the device has completed it."""
        return self._device.is_over(self.times[1])


class DeviceStream:
    """Runs jobs on a stream of the device; on the CPU, immediately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.new_stream()

    @contextlib.contextmanager
    def enqueue(self, after: Work | None = None, *, timed: bool = False) -> Iterator[DeviceWork]:
        """Run the body of the ``with`` on this stream, ``after`` work of another stream.

        Unless it is ``timed``, its `Work.times` are `NO_TIME`.
        """
        device, stream = self._device, self._stream
        device.wait(stream, device.record(device.current_stream()))
        if after is not None:
            device.wait(stream, after.times[1])
        work, began = DeviceWork(device), device.record_time(stream) if timed else NO_TIME
        with device.use(stream):
            try:
                yield work
            except Exception as error:  # noqa: BLE001 - raised where the result is needed
                work.error = error
        work.times = (began, device.record_time(stream) if timed else device.record(stream))
        work.done = True

    def submit(self, job: Callable[[], None]) -> DeviceWork:
        with self.enqueue(timed=True) as work:
            job()
        return work


CommStream = DeviceStream | ThreadStream  # runs jobs in the order of their submission


def _work(jobs: "SimpleQueue[Work | None]") -> None:
    while (work := jobs.get()) is not None:
        work.run()
        del work  # an idle stream keeps no tensor alive


def run_together(actions: Sequence[Callable[[], object]]) -> None:
    """Run each action on a thread of its own, and return when all have ended."""
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- copies --------------------------------------------------------------------------------------


def copy_(dst: Tensor, src: Tensor) -> None:
    """Copy and cast; between devices asynchronously, if the host memory is pinned."""
    is_moved = dst.device != src.device
    if is_moved and src.device.type == "cpu" and src.dtype != dst.dtype:
        src = src.to(dst.device, non_blocking=True)  # otherwise the host would cast, and block
    dst.copy_(src, non_blocking=is_moved)


def copy_scaled_(dst: Tensor, src: Tensor, scale: float) -> None:
    """Copy ``src`` [n] to ``dst`` [n], cast, then multiply by ``scale``; they may be the same."""
    pieces: Iterable[tuple[Tensor, Tensor]] = [(dst, src)]
    if len(dst) > _CACHED_ELEMENTS and dst.device.type == "cpu":
        size = _CACHED_ELEMENTS
        pieces = zip(torch.split(dst, size), torch.split(src, size), strict=True)
    for into, piece in pieces:
        if into.data_ptr() != piece.data_ptr():
            into.copy_(piece)
        if scale != 1.0:
            into.mul_(scale)


# -- the machine ---------------------------------------------------------------------------------


def make_current(device: torch.device) -> None:
    """Make an accelerator the current device of the calling thread.

    New threads begin with the first device. Events and streams of torch switch to their own device
    and back, and switching to a device creates a context on it, which takes hundreds of megabytes
    of another rank's memory.
    """
    has_others = is_accelerator(device) and device.index is not None
    if has_others and torch.accelerator.current_device_index() != device.index:
        torch.accelerator.set_device_index(device.index)


def own_device() -> torch.device:
    """Return this rank's accelerator: the current one if the program set it, else LOCAL_RANK's.

    A rank that sees only some accelerators of its machine numbers them from 0.
    """
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    index = torch.accelerator.current_device_index()
    if not index:  # perhaps the program has not set it
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's default generators: the CPU's, and that of an accelerator.

    They are uint8 tensors on the CPU.
    """
    states = [torch.get_rng_state()]
    if device.type not in ON_HOST:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Restore the ``states`` that `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def keeping_random_states(device: torch.device) -> Iterator[None]:
    """Restore the states of the default generators at the end of a ``with``."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(device, states)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators whose states `random_states` returns, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ON_HOST:
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)
