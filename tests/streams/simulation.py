"""A simulated accelerator: streams and events with a known order, on host memory.

Operators run synchronously on the CPU, so values are those of the CPU. Clocks
(`tests/streams/clock.py`) and addresses (`tests/streams/memory.py`) show which operations would be
concurrent on a device.
"""

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.streams.clock import Clock, ConcurrentStream, Stream, Timeline
from tests.streams.memory import HOST, Access, Block, Memory, Place, byte_runs

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Collective", "Found", "Problem", "Simulation"]

_DEFAULT = 1  # the number of the first stream: the host is 0


class Problem(StrEnum):
    """A kind of error in a program."""

    RACE = "race"  # two unordered accesses, of which one writes
    HOST_RACE = "host race"  # a race with the host
    EARLY_FREE = "early free"  # memory is freed while another stream uses it
    SYNC = "sync"  # the host waits in a steady step
    PLACE = "place"  # an operation has operands on different devices
    NCCL = "nccl"  # arguments that NCCL does not support
    ORDER = "order"  # ranks launch different collectives


@dataclass(frozen=True)
class Found:
    """A problem and its description."""

    problem: Problem
    text: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.text}"


@dataclass(frozen=True)
class Collective:
    """One collective that a rank launched."""

    group: str
    ranks: tuple[int, ...]
    operation: str
    num_bytes: int
    place: str = ""  # in symmetric memory, if registered
    is_planned: bool = False  # in a step whose memory is planned


@dataclass
class _Thread(threading.local):
    """The state of one thread of the program."""

    streams: list[Stream] = field(default_factory=list)  # entered by ``with``


class Simulation:
    """The devices of one rank, and the problems found.

    Args:
        is_late: operations on streams other than the default one run when something waits for them.
        is_concurrent: operations on these streams run on threads instead.
        num_devices: number of devices of the host.
    """

    def __init__(
        self, *, is_late: bool = False, is_concurrent: bool = False, num_devices: int = 2
    ) -> None:
        self.is_late = is_late
        self.is_concurrent = is_concurrent
        self.host = Timeline(0, "the host")
        self.memory = Memory(self._check_end)
        self.found: list[Found] = []
        self.collectives: list[Collective] = []
        self.groups: list[tuple[tuple[int, ...], str]] = []  # ranks and names of created groups
        self.groups_without_kernels: set[str] = set()
        self.num_registered = 0  # allocations
        self.num_emptied_caches = 0  # of the device's allocator
        self.syncs: Counter[str] = Counter()  # number of waits of the host, by location
        self.is_steady = False  # the host must not wait
        self.is_planned = False  # all that is allocated has been allocated before
        self.current_device = 0
        # Not the device that is current at first, so that a mistaken use of that one is found.
        self.model_device = torch.device("cuda", num_devices - 1)
        self.num_operations = 0
        self._num_timelines = _DEFAULT
        self._streams: list[Stream] = []
        self._defaults = [
            self._stream(torch.device("cuda", i), "the default stream") for i in range(num_devices)
        ]
        self._thread = _Thread()
        self._lock = threading.RLock()

    # -- streams ---------------------------------------------------------------------------------

    @property
    def num_devices(self) -> int:
        return len(self._defaults)

    def register(self, storage: torch.UntypedStorage, *, is_symmetric: bool) -> None:
        """Record that the backend has registered memory."""
        block = self.memory.block_at(storage.data_ptr())
        assert block is not None
        self.num_registered += 1
        block.window = f"window {self.num_registered}" if is_symmetric else ""

    def new_stream(self, device: torch.device | None = None) -> Stream:
        return self._stream(self._indexed(device), f"stream {self._num_timelines}")

    def default_stream(self, device: torch.device | None = None) -> Stream:
        return self._defaults[self._indexed(device).index]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        device = self._indexed(device)
        entered = (s for s in reversed(self._thread.streams) if s.device == device)
        return next(entered, self._defaults[device.index])

    def enter(self, stream: Stream) -> None:
        self._thread.streams.append(stream)

    def leave(self, stream: Stream) -> None:
        assert self._thread.streams.pop() is stream

    def block_host(self, stream: Stream, clock: Clock, position: int, reason: str) -> None:
        """Make the host wait until ``stream`` has reached ``clock``."""
        stream.run_until(position)
        self.host.join(clock)
        where = f"{reason} in {location()}"
        self.syncs[where] += 1
        if self.is_steady:
            self.report(Problem.SYNC, where)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Make the host wait for the current stream of ``device``."""
        self.current_stream(device).synchronize()

    def finish(self) -> None:
        """Run everything that is queued; the host waits."""
        for stream in self._streams:
            stream.run_until(stream.position)
            stream.close()
            self.host.join(stream.clock)

    # -- memory ----------------------------------------------------------------------------------

    def place_of(self, tensor: Tensor) -> Place:
        return self.memory.place_of(tensor.untyped_storage()) or HOST

    def timeline_for(self, places: Sequence[Place]) -> Timeline:
        """The timeline of an operation on tensors at ``places``."""
        device = next((place.device for place in places if place.is_device), None)
        return self.host if device is None else self.current_stream(device)

    def begin(self, timeline: Timeline) -> int:
        """Begin a new operation on ``timeline``; return its number."""
        self.num_operations += 1
        if timeline is not self.host:
            timeline.join(self.host.clock)
        return timeline.advance()

    def use(
        self, tensor: Tensor, timeline: Timeline, number: int, what: str, *, is_write: bool
    ) -> None:
        """Record that operation ``number`` of ``timeline`` reads or writes ``tensor``."""
        runs = byte_runs(tensor)
        block = self.memory.block_at(runs[0][0]) if runs else None
        if block is None:
            return
        access = Access(timeline, number, runs, is_write, what)
        with self._lock:
            self._check(block, access)
            block.accesses = [old for old in block.accesses if not _replaces(access, old)]
            block.accesses.append(access)

    def report(self, problem: Problem, text: str) -> None:
        self.found.append(Found(problem, text))

    def _check(self, block: Block, access: Access) -> None:
        for old in block.accesses:
            if old.conflicts_with(access) and not old.happened_before(access.timeline):
                of_host = self.host in (old.timeline, access.timeline)
                problem = Problem.HOST_RACE if of_host else Problem.RACE
                self.report(problem, f"{access}, not ordered after: {old}; from {block.made_by}")

    def _check_end(self, block: Block) -> None:
        """Check a freed block, which the allocator may give to its owner again immediately."""
        if block.is_recorded or not block.place.is_device:
            return  # the allocator of pinned memory waits for its copies itself
        for access in block.accesses:
            # Later uses by the owner are ordered after what the host has synchronized with.
            if not any(access.happened_before(one) for one in (block.owner, self.host)):
                self.report(
                    Problem.EARLY_FREE,
                    f"memory of {block.owner} from {block.made_by} ended, not ordered after: "
                    f"{access}",
                )

    # -- details ---------------------------------------------------------------------------------

    def _stream(self, device: torch.device, name: str) -> Stream:
        is_default, number, name = (
            not name.startswith("stream"),
            self._num_timelines,
            f"{name} of {device}",
        )
        if self.is_concurrent and not is_default:
            stream: Stream = ConcurrentStream(self, device, number, name)
        else:
            is_late = self.is_late and not is_default
            stream = Stream(self, device, number, name, is_late=is_late)
        self._num_timelines += 1
        self._streams.append(stream)
        return stream

    def _indexed(self, device: torch.device | str | int | None) -> torch.device:
        if isinstance(device, int):
            return torch.device("cuda", device)
        index = None if device is None else torch.device(device).index
        return torch.device("cuda", self.current_device if index is None else index)


def location() -> str:
    """The innermost running functions of shardwise."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 3:
        file = _file_of_shardwise(frame.f_code.co_filename)
        if file:
            names.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names) or "the program"


@cache
def _file_of_shardwise(path: str) -> str:
    return path.rpartition("/")[2] if "/shardwise/" in path else ""


def _replaces(new: Access, old: Access) -> bool:
    """Whether every order with ``old`` follows from an order with ``new``, which is later."""
    if len(new.runs) != 1 or (old.is_write and not new.is_write):
        return False
    start, stop = new.runs[0]
    is_covered = start <= old.bounds[0] and old.bounds[1] <= stop
    follows = old.happened_before(new.timeline) if new.is_write else old.timeline is new.timeline
    return is_covered and follows
