"""Where communication runs while compute goes on: the only file that knows CUDA from CPU.

A `Lane` runs jobs one after the other, beside the caller, and hands back a `Mark` for each. On
CUDA a lane is a stream and a mark an event, so nothing here blocks the host. On CPU a lane is a
thread: Gloo's point-to-point works neither poll nor chain, so somebody has to sit and wait for
them, and it must not be the thread that computes (measured: the hand-over costs nothing that
shows next to the 1 to 1.6 ms of a small exchange). Without peers a lane just runs the job.
"""

import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "InlineLane",
    "Lane",
    "Mark",
    "copy",
    "current_gpu",
    "host_tensor",
    "local_device",
    "make_lane",
    "num_local_gpus",
    "peak_memory_bytes",
    "random_states",
    "seed_generators",
    "set_random_states",
    "to_host",
]


class Mark:
    """The end of one job: ``started`` and ``finished`` are seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.started = 0.0
        self.finished = 0.0
        self.error: BaseException | None = None
        self.is_done = False
        # A bare lock: each collective has a mark, and an Event takes several times as long.
        self._running = threading.Lock()
        self._running.acquire()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether the job ended, after at most ``timeout_seconds``; its error is not raised."""
        if not self.is_done and self._running.acquire(timeout=timeout_seconds):
            self._running.release()  # for whoever else waits
        return self.is_done

    def wait_on_device(self) -> None:
        """Have the current stream wait for it; on the CPU, the caller."""
        self._await()

    def synchronize(self) -> None:
        """Return when the host may read what the job wrote, or raise the job's error."""
        self._await()
        if self.error is not None:
            raise self.error

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, and let go of it before anybody is told that it ended."""
        self.started = time.perf_counter()
        try:
            job()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is needed
            self.error = error
        del job  # and the memory that it holds, or the peak would depend on this thread's luck
        self.finished = time.perf_counter()
        self.is_done = True
        self._running.release()

    def _await(self) -> None:
        if not self.is_done:
            with self._running:
                pass


class Lane(Protocol):
    """Jobs in order, beside the caller."""

    def submit(self, job: Callable[[], None]) -> Mark:
        """Run ``job`` after all that the caller has computed and all that was submitted before."""
        ...


class InlineLane:
    """Runs a job at once: for a single rank, and for process groups that have no wire."""

    def submit(self, job: Callable[[], None]) -> Mark:
        mark = Mark()
        mark.run(job)
        return mark


class ThreadLane:
    """Runs jobs on a thread of its own, which ends when the lane is dropped."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Submitted | None] = SimpleQueue()
        worker = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None)
        worker.start()

    def submit(self, job: Callable[[], None]) -> Mark:
        mark = Mark()
        self._jobs.put(([job], mark))
        return mark


class _CudaMark(Mark):
    """Compute waits on the device; the host does not, for which a job is done when it is queued."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout_seconds: float) -> bool:  # noqa: ARG002 - the host never waits
        self.wait_on_device()
        return True

    def wait_on_device(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaLane:
    """Runs jobs on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def submit(self, job: Callable[[], None]) -> Mark:
        self._stream.wait_stream(torch.cuda.current_stream())
        mark = _CudaMark(torch.cuda.Event())  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            mark.run(job)
            mark._event.record(self._stream)
        if mark.error is not None:
            raise mark.error
        return mark


def make_lane(device: torch.device, *, threaded: bool, name: str) -> Lane:
    """A lane for tensors on ``device``; ``threaded`` where communication blocks its caller."""
    if device.type == "cuda":
        return CudaLane(device)
    return ThreadLane(name) if threaded else InlineLane()


@torch.no_grad()
def copy(to: Tensor, of: Tensor) -> None:
    """Copy and cast; between devices, beside what is computed, if the host's memory is pinned."""
    if to.is_cuda and not of.is_cuda:
        of = of.to(to.device, non_blocking=True)  # or the host would do the cast, and wait for it
    to.copy_(of, non_blocking=to.device != of.device)


def host_tensor(num_elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Zeros [num_elements] on the host; ``pinned`` for copies from and to a GPU."""
    return torch.zeros(num_elements, dtype=dtype, pin_memory=pinned)


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
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
    """Seed the generators that `random_states` tells of, and no other."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; from a GPU it is made beside the host, in pinned memory."""
    is_pinned = tensor.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned, requires_grad=False)
    return copy.copy_(tensor.detach(), non_blocking=is_pinned)


_Submitted = tuple[list[Callable[[], None]], Mark]  # one job, to be taken out


def _work(jobs: "SimpleQueue[_Submitted | None]") -> None:
    while (submitted := jobs.get()) is not None:
        box, mark = submitted
        mark.run(box.pop())
        del submitted, box, mark  # an idle lane keeps no tensor alive
