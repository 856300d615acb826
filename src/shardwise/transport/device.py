"""Devices and streams: everything in which accelerators and the CPU differ.

A `CommStream` runs jobs one after the other, concurrently with the caller, and returns a `Work` for
each. On an accelerator it is a stream of the device and a work holds an event, so the host never
blocks. On the CPU it is a thread: Gloo's point-to-point works can be neither polled nor chained, so
a thread has to wait for them, and it must not be the one that computes (the hand-over is lost in
the 1 to 1.6 ms of a small exchange).
"""

import contextlib
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import PlanError
from shardwise.transport.api import CollectiveId, Work
from shardwise.transport.backends import capabilities_of

__all__ = [
    "KINDS",
    "Accelerator",
    "CommStream",
    "Device",
    "DeviceStream",
    "DeviceWork",
    "ThreadStream",
    "allocated_bytes",
    "check_device",
    "copy_",
    "copy_scaled_",
    "device_of",
    "is_accelerator",
    "local_device",
    "name_of",
    "num_local_accelerators",
    "own_device",
    "peak_memory_bytes",
    "random_states",
    "seed_generators",
    "set_random_states",
    "total_memory_bytes",
    "wait_for_device",
]

_ON_HOST = ("cpu", "meta")
# Devices say how long ago an event was in milliseconds of single precision: after an hour, to 1/4.
_ORIGIN_SECONDS = 10.0
_CACHED_ELEMENTS = 1 << 17  # a copy of so many is still in the processor's cache


# -- devices -------------------------------------------------------------------------------------


class Device:
    """A `torch.device` and its streams. The CPU has none: calls take effect at once."""

    is_accelerator = False

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def new_stream(self) -> Any:
        """A stream that runs concurrently with the current one."""

    def current_stream(self) -> Any:
        """The stream that kernels of the calling thread go to."""

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Make ``stream`` the current one within a ``with``."""
        return contextlib.nullcontext()

    def record(self, stream: Any) -> SupportsFloat:  # noqa: ARG002
        """An event at the end of ``stream``: as a float, when it took place, in seconds.

        Of `time.perf_counter`; the host waits for it to know.
        """
        return time.perf_counter()

    def wait(self, stream: Any, event: SupportsFloat) -> None:
        """Have later work on ``stream`` wait for ``event``."""

    def synchronize(self, event: SupportsFloat) -> None:
        """Have the host wait until ``event`` has taken place."""

    def is_over(self, event: SupportsFloat) -> bool:  # noqa: ARG002
        """Whether ``event`` has taken place."""
        return True


class Accelerator(Device):
    """A device with streams (CUDA, ROCm, XPU), by the interface that torch has for all of them."""

    is_accelerator = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        event = torch.Event(device, enable_timing=True)
        event.record(self.current_stream())
        event.synchronize()
        self._origin = StreamEvent(event, seconds=time.perf_counter())
        self._renewed = time.perf_counter()

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.torch_device, priority=-1)

    def current_stream(self) -> torch.Stream:
        # Of this device: the caller may have another one current.
        return torch.accelerator.current_stream(self.torch_device)

    def use(self, stream: torch.Stream) -> contextlib.AbstractContextManager[Any]:
        return stream

    def record(self, stream: torch.Stream) -> "StreamEvent":
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        recorded = StreamEvent(event, self._origin)
        now = time.perf_counter()
        if now - self._renewed > _ORIGIN_SECONDS and self.is_over(self._origin):
            float(self._origin)  # which frees the one before
            self._origin, self._renewed = recorded, now
        return recorded

    def wait(self, stream: torch.Stream, event: Any) -> None:
        stream.wait_event(event.event)

    def synchronize(self, event: Any) -> None:
        event.event.synchronize()

    def is_over(self, event: Any) -> bool:
        return bool(event.event.query())


class StreamEvent:
    """An event of a stream; its time is known when it has taken place, from that of ``origin``."""

    def __init__(
        self, event: torch.Event, origin: "StreamEvent | None" = None, seconds: float = 0.0
    ) -> None:
        self.event = event
        self._origin = origin
        self._seconds = seconds

    def __float__(self) -> float:
        if self._origin is not None:
            self.event.synchronize()
            since = self._origin.event.elapsed_time(self.event) / 1e3
            self._seconds, self._origin = float(self._origin) + since, None
        return self._seconds


KINDS: dict[str, type[Device]] = {"cpu": Device, "meta": Device}  # all others: `Accelerator`


def device_of(device: torch.device) -> Device:
    """The streams of ``device``."""
    return KINDS.get(device.type, Accelerator)(device)


def wait_for_device(device: torch.device) -> None:
    """Have the host wait for what the calling thread has queued on ``device``."""
    here = device_of(device)
    here.synchronize(here.record(here.current_stream()))


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` has streams, and memory of its own."""
    return KINDS.get(device.type, Accelerator).is_accelerator


def check_device(device: torch.device) -> None:
    """Refuse a device that flat buffers cannot be on.

    Raises:
        PlanError: says why, and what to do.
    """
    if device.type == "mps":
        raise PlanError(
            "the model is on mps, where a part of a tensor has no address of its own, so gathered "
            "parameters cannot be parts of one buffer; expected cpu, cuda or xpu: call "
            "model.to('cpu') before fully_shard"
        )


# -- streams -------------------------------------------------------------------------------------


class ThreadStream:
    """Runs jobs on a thread of its own, which ends when the stream is dropped."""

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
    """Work of a `DeviceStream`: for the host it is done when it is queued."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def wait(self, timeout_seconds: float = -1) -> bool:  # noqa: ARG002 - the host never waits
        # Also for failed work: kernels that it queued use memory that may be freed now.
        self._device.wait(self._device.current_stream(), self.times[1])
        return True

    def wait_on_device(self) -> None:
        """Have the current stream wait for it, or raise its error; on the CPU, it is over."""
        if self.error is not None:
            raise self.error
        self.wait()

    def synchronize(self) -> None:
        """Return when the host may read what the job wrote, or raise its error."""
        if self.error is not None:
            raise self.error
        self._device.synchronize(self.times[1])

    @property
    def is_over(self) -> bool:
        """Whether the device has done it."""
        return self._device.is_over(self.times[1])


class DeviceStream:
    """Runs jobs on a stream of the device; on the CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.new_stream()

    @contextlib.contextmanager
    def enqueue(self, after: Work | None = None) -> Iterator[DeviceWork]:
        """Run the body of the ``with`` on this stream, as `submit` does a function.

        Args:
            after: a work of another stream, which runs before.
        """
        device, stream = self._device, self._stream
        device.wait(stream, device.record(device.current_stream()))
        if after is not None:
            device.wait(stream, after.times[1])
        work, began = DeviceWork(device), device.record(stream)
        with device.use(stream):
            try:
                yield work
            except Exception as error:  # noqa: BLE001 - it is raised where the result is needed
                work.error = error
        work.times = (began, device.record(stream))
        work.done = True

    def submit(self, job: Callable[[], None]) -> DeviceWork:
        with self.enqueue() as work:
            job()
        return work


CommStream = DeviceStream | ThreadStream  # runs jobs in the order of their submission


def _work(jobs: "SimpleQueue[Work | None]") -> None:
    while (work := jobs.get()) is not None:
        work.run()
        del work  # an idle stream keeps no tensor alive


# -- copies --------------------------------------------------------------------------------------


def copy_(dst: Tensor, src: Tensor) -> None:
    """Copy and cast; between devices asynchronously, if the host's memory is pinned."""
    is_moved = dst.device != src.device
    if is_moved and src.device.type == "cpu":
        src = src.to(dst.device, non_blocking=True)  # or the host would cast, and block
    dst.copy_(src, non_blocking=is_moved)


def copy_scaled_(dst: Tensor, src: Tensor, scale: float) -> None:
    """Fill ``dst`` [n] with ``scale`` times ``src`` [n], cast first; both may be the same."""
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


def num_local_accelerators() -> int:
    """Accelerators of this machine that ranks can use; 0 where they compute on the CPU."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    backend = None if kind is None else dist.Backend.default_device_backend_map.get(kind.type)
    if backend is None or not capabilities_of(backend).is_stream_ordered:
        return 0  # as on MPS, whose ranks cannot exchange anything
    return torch.accelerator.device_count()


def local_device() -> torch.device:
    """This rank's own device: an accelerator, which becomes current, or the CPU."""
    if not num_local_accelerators():
        return torch.device("cpu")
    device = own_device()
    torch.accelerator.set_device_index(device.index)
    return device


def own_device() -> torch.device:
    """This rank's accelerator: the current one, if a program has chosen it, or by LOCAL_RANK.

    A rank that sees some of the accelerators of its machine numbers them from 0.
    """
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    index = torch.accelerator.current_device_index()
    if not index:  # perhaps nothing has been chosen yet
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    return torch.device(kind.type, index)


def name_of(device: torch.device) -> str:
    """Such as "cpu" or "NVIDIA H100"."""
    if device.type in _ON_HOST:
        return device.type
    return str(torch.get_device_module(device).get_device_name(device))


def allocated_bytes(device: torch.device) -> int:
    """What the allocator of an accelerator has given to tensors."""
    return torch.accelerator.memory_allocated(device)


def total_memory_bytes(device: torch.device) -> int | None:
    """The memory of an accelerator; None on the CPU."""
    return None if device.type in _ON_HOST else torch.accelerator.get_memory_info(device)[1]


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held so far: of the accelerator, or resident on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def num_allocation_failures(device: torch.device) -> int:
    """How often an accelerator has run out of memory for this process; 0 on the CPU."""
    if device.type in _ON_HOST:
        return 0
    return int(torch.accelerator.memory_stats(device).get("num_ooms", 0))


def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's default generators: of the CPU, and of ``device`` if it is another.

    Bytes, on the CPU.
    """
    states = [torch.get_rng_state()]
    if device.type not in _ON_HOST:
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of `random_states`, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type not in _ON_HOST:
        with torch.accelerator.device_index(device.index):
            torch.get_device_module(device).manual_seed(seed)
