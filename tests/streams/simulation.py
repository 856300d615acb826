"""A simulated accelerator: streams and events whose order is known, over memory of the host.

Operators run in line on the CPU, so values are those of the CPU. What would be concurrent on a
device is found by clocks (`tests/streams/clock.py`) and addresses (`tests/streams/memory.py`).
"""

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
    """What a program may do wrong."""

    RACE = "race"  # two accesses of which one writes, in no order
    HOST_RACE = "host race"  # one of them is the host's
    EARLY_FREE = "early free"  # memory ended while another stream used it
    SYNC = "sync"  # the host waited in a steady step
    PLACE = "place"  # an operation got memory that it cannot use
    NCCL = "nccl"  # arguments that NCCL does not take
    ORDER = "order"  # ranks launch different collectives


@dataclass(frozen=True)
class Found:
    """A problem, where it is, and how."""

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
    place: str = ""  # in symmetric memory


@dataclass
class _Thread(threading.local):
    """What each thread of the program has for itself."""

    streams: list[Stream] = field(default_factory=list)  # entered by ``with``


class Simulation:
    """The devices of one rank, and what was found.

    Args:
        is_late: operations of streams other than the default one wait until somebody waits for
            them.
        is_concurrent: they run on threads instead.
        num_devices: that the host has.
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
        self.groups: list[tuple[tuple[int, ...], str]] = []  # ranks and name of those it made
        self.groups_without_kernels: set[str] = set()
        self.num_registered = 0  # pieces of memory
        self.syncs: Counter[str] = Counter()  # since the start, by where the host waited
        self.is_steady = False  # the host must not wait
        self.current_device = 0
        # Not the one that is current at first: what asks for that by mistake is found.
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
        """The backend has registered memory."""
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
        """The host waits until ``stream`` has come to ``clock``."""
        stream.run_until(position)
        self.host.join(clock)
        where = f"{reason} in {location()}"
        self.syncs[where] += 1
        if self.is_steady:
            self.report(Problem.SYNC, where)

    def synchronize(self, device: torch.device | None = None) -> None:
        """The host waits for the current stream of ``device``."""
        self.current_stream(device).synchronize()

    def finish(self) -> None:
        """Run all that is queued; the host waits for it."""
        for stream in self._streams:
            stream.run_until(stream.position)
            stream.close()
            self.host.join(stream.clock)

    # -- memory ----------------------------------------------------------------------------------

    def place_of(self, tensor: Tensor) -> Place:
        return self.memory.place_of(tensor.untyped_storage()) or HOST

    def timeline_for(self, places: Sequence[Place]) -> Timeline:
        """Where an operation on tensors at ``places`` runs."""
        device = next((place.device for place in places if place.is_device), None)
        return self.host if device is None else self.current_stream(device)

    def begin(self, timeline: Timeline) -> int:
        """A new operation on ``timeline``."""
        self.num_operations += 1
        if timeline is not self.host:
            timeline.join(self.host.clock)
        return timeline.advance()

    def use(
        self, tensor: Tensor, timeline: Timeline, number: int, what: str, *, is_write: bool
    ) -> None:
        """Operation ``number`` of ``timeline`` reads or writes ``tensor``."""
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
        """A block goes back to the allocator, which gives it to its owner again at once."""
        if block.is_recorded or not block.place.is_device:
            return  # the allocator of pinned memory watches the copies from and to it itself
        for access in block.accesses:
            # What its owner does with the memory from now on follows what the host knows.
            if not any(access.happened_before(one) for one in (block.owner, self.host)):
                self.report(
                    Problem.EARLY_FREE,
                    f"memory of {block.owner} from {block.made_by} ended, not ordered after: "
                    f"{access}",
                )

    # -- pieces ----------------------------------------------------------------------------------

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
    """The innermost functions of shardwise that are running."""
    frame: FrameType | None = sys._getframe(1)
    names: list[str] = []
    while frame is not None and len(names) < 3:
        path = frame.f_code.co_filename
        if "/shardwise/" in path:
            names.append(f"{path.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names) or "the program"


def _replaces(new: Access, old: Access) -> bool:
    """Whether all that must be ordered with ``old`` must be with ``new``, which follows it."""
    if len(new.runs) != 1 or (old.is_write and not new.is_write):
        return False
    start, stop = new.runs[0]
    is_covered = start <= old.bounds[0] and old.bounds[1] <= stop
    follows = old.happened_before(new.timeline) if new.is_write else old.timeline is new.timeline
    return is_covered and follows
