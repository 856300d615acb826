"""Streams that communication runs on, and all else in which CUDA and the CPU differ.

A `CommStream` runs jobs one after the other, concurrently with the caller, and returns a `Work` for
each. On CUDA it is a stream of the device and a work holds an event, so the host never blocks. On
the CPU it is a thread: Gloo's point-to-point works can be neither polled nor chained, so a thread
has to wait for them, and it must not be the one that computes (the hand-over is lost in the 1 to
1.6 ms of a small exchange).
"""

import contextlib
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from shardwise.transport.api import Work

__all__ = [
    "CommStream",
    "DeviceStream",
    "ThreadStream",
    "copy_",
    "copy_scaled_",
    "current_gpu",
    "local_device",
    "num_local_gpus",
    "peak_memory_bytes",
    "random_states",
    "seed_generators",
    "set_random_states",
    "to_host",
]


_CACHED_ELEMENTS = 1 << 17  # a copy of so many is still in the processor's cache


class ThreadStream:
    """Runs jobs on a thread of its own, which ends when the stream is dropped."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Submitted | None] = SimpleQueue()
        worker = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None)
        worker.start()

    def submit(self, job: Callable[[], None], work: Work | None = None) -> Work:
        work = Work() if work is None else work
        self._jobs.put(([job], work))
        return work


class DeviceWork(Work):
    """Work of a `DeviceStream`: for the host it is done when it is queued."""

    def __init__(self, current_stream: Callable[[], Any], event: Any) -> None:
        super().__init__()
        self._current_stream = current_stream
        self._event = event

    def wait(self, timeout_seconds: float) -> bool:  # noqa: ARG002 - the host never waits
        if self.error is None:
            self.wait_on_device()
        return True

    def wait_on_device(self) -> None:
        if self.error is not None:
            raise self.error
        self._current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        self._event.synchronize()


class DeviceStream:
    """Runs jobs on a CUDA stream of its own; on the CPU, at once."""

    def __init__(self, device: torch.device) -> None:
        # The streams and events of `torch.cpu` do nothing.
        self._module: Any = torch.cuda if device.type == "cuda" else torch.cpu
        # Of the stream's device: the caller may have another one current.
        self._current_stream = partial(self._module.current_stream, device)
        options = {"device": device, "priority": -1} if device.type == "cuda" else {}
        self._stream = self._module.Stream(**options)

    @contextlib.contextmanager
    def enqueue(self) -> Iterator[Work]:
        """`submit` of the body of the ``with``, without a frame of its own."""
        self._stream.wait_stream(self._current_stream())
        event = self._module.Event()
        work = DeviceWork(self._current_stream, event)
        with self._module.stream(self._stream), work.running():
            yield work
        event.record(self._stream)

    def submit(self, job: Callable[[], None]) -> Work:
        with self.enqueue() as work:
            job()
        return work


CommStream = DeviceStream | ThreadStream  # runs jobs in the order of their submission


@torch.no_grad()
def copy_(dst: Tensor, src: Tensor) -> None:
    """Copy and cast; between devices asynchronously, if the host's memory is pinned."""
    if dst.is_cuda and not src.is_cuda:
        src = src.to(dst.device, non_blocking=True)  # or the host would cast, and block
    dst.copy_(src, non_blocking=dst.device != src.device)


def copy_scaled_(dst: Tensor, src: Tensor, scale: float) -> None:
    """Fill ``dst`` [n] with ``scale`` times ``src`` [n], cast first; both may be the same."""
    size = max(1, len(dst)) if dst.is_cuda else _CACHED_ELEMENTS
    for into, piece in zip(torch.split(dst, size), torch.split(src, size), strict=True):
        if into.data_ptr() != piece.data_ptr():
            into.copy_(piece)
        if scale != 1.0:
            into.mul_(scale)


def local_device() -> torch.device:
    """This rank's own device: the GPU of its LOCAL_RANK, which becomes current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def current_gpu() -> torch.device:
    """The GPU that the user made current."""
    return torch.device("cuda", torch.cuda.current_device())


def num_local_gpus() -> int:
    """GPUs of this machine; 0 where ranks compute on the CPU."""
    return torch.cuda.device_count()


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held so far: of the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's default generators: the CPU's, and that of ``device`` if it is a GPU.

    Bytes, on the CPU.
    """
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    """Put back what `random_states` returned."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed the generators of `random_states`, and no others."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from a GPU it is made asynchronously, in pinned memory."""
    is_pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned, requires_grad=False)
    return copy.copy_(tensor.detach(), non_blocking=is_pinned)


_Submitted = tuple[list[Callable[[], None]], Work]  # a box with one job, to be emptied


def _work(jobs: "SimpleQueue[_Submitted | None]") -> None:
    while (submitted := jobs.get()) is not None:
        box, work = submitted
        work.run(box.pop())
        del submitted, box, work  # an idle stream keeps no tensor alive
