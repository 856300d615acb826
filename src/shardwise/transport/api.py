"""Groups of ranks, descriptions of collectives, and handles of work under way."""

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "CollectiveId",
    "Hop",
    "Operation",
    "RankGroup",
    "Reduction",
    "Sent",
    "Stage",
    "Step",
    "Work",
]


class Operation(StrEnum):
    """One way to sum over ranks."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange something, in the order of their slots.

    Slot i of a gathered or reduced tensor belongs to ``ranks[i]``. Ranks are numbered within
    ``parent``, the process group of the whole mesh.
    """

    ranks: tuple[int, ...]
    own_rank: int
    parent: dist.ProcessGroup | None = None  # None: one process, or a forecast

    @cached_property
    def index(self) -> int:
        """The slot of this rank."""
        return self.ranks.index(self.own_rank)

    @cached_property
    def digest(self) -> bytes:
        """Of the ranks, of which there may be thousands."""
        return hashlib.sha1(repr(self.ranks).encode(), usedforsecurity=False).digest()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def others(self) -> tuple[tuple[int, int], ...]:
        """Slot and rank of every other member."""
        return tuple((i, rank) for i, rank in enumerate(self.ranks) if rank != self.own_rank)

    def select(self, *ranks: int) -> "RankGroup":
        """Some of the ranks of the same parent, of which this rank is one."""
        return RankGroup(ranks, self.own_rank, self.parent)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a reduction."""

    operation: Operation
    group: RankGroup


@dataclass(frozen=True, slots=True)
class Reduction:
    """The memory of one reduction, and the stages that it goes through.

    A reduce-scatter over n ranks leaves each of them 1/n of its input; an all-reduce leaves all.
    Every rank has the same bits after an all-reduce.
    """

    flat: Tensor  # [n * M], this rank's addend
    inner: Tensor  # [M], for the sum of the first stage; may be `out`, or its slot of `flat`
    carried: Tensor | None  # [M], an earlier sum of the first stage, to be added
    out: Tensor | None  # for the sum of the last stage; None: the sum stays in `inner`
    stages: tuple[Stage, ...]
    scale: float = 1.0  # of `out`; applied in its own dtype, unless that makes no difference
    only_sums: bool = False  # the backend is asked for sums, and not for averages
    stays_in_flat: bool = False  # no collective writes to `out`

    @property
    def is_cast(self) -> bool:
        """Whether the sum ends in another dtype than that of its addends."""
        return self.out is not None and self.out.dtype != self.flat.dtype

    def scattered(self, group: RankGroup) -> Tensor:
        """Where the sum of a later reduce-scatter over ``group`` goes: this rank's part [S]."""
        if self.out is None or self.is_cast or self.stays_in_flat:
            return self.inner.view(group.size, -1)[group.index]
        return self.out


@dataclass(frozen=True, slots=True)
class Hop:
    """An exchange of bytes, with the functions that make them and use them.

    ``encode`` fills what this rank sends, ``decode`` gets what it has received [ranks, row_bytes].
    """

    group: RankGroup
    row_bytes: int
    encode: Callable[[Tensor], None]  # [ranks, row_bytes]: a row for each rank; or [row_bytes]
    decode: Callable[[Tensor], None]
    gathers: bool = False  # all ranks get the same row from this one

    def prepare(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What this rank sends, and what it will have received; its own row is there already."""
        rows = torch.empty((self.group.size, self.row_bytes), dtype=torch.uint8, device=device)
        own = rows[self.group.index]
        if self.gathers:
            self.encode(own)
            return own, rows
        sent = torch.empty_like(rows)
        self.encode(sent)
        own.copy_(sent[self.group.index])
        return sent, rows


Step = Hop | Callable[[], None]  # of one collective of several


class Sent(NamedTuple):
    """What a rank sends in an exchange: ``num_bytes`` to each of ``ranks`` but itself."""

    ranks: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """One collective: the ``number``-th of its queue, among ``ranks``.

    ``slot_bytes`` pass between any two of the ranks, unless ``pairs`` says what passes between
    this one and each of the others: its rank, the bytes to it and those from it.
    """

    number: int
    label: str
    slot_bytes: int
    ranks: tuple[int, ...] = ()
    is_shared: bool = False  # it may take place in shared memory
    pairs: tuple[tuple[int, int, int], ...] = ()

    def bytes_with(self, rank: int) -> tuple[int, int]:
        """The bytes from this rank to ``rank``, and those from there."""
        if not self.pairs:
            return self.slot_bytes, self.slot_bytes
        return next(((to, back) for other, to, back in self.pairs if other == rank), (0, 0))

    def sent_by(self, rank: int) -> Iterator[Sent]:
        """What ``rank``, this one, sends."""
        if not self.pairs:
            yield Sent(self.ranks, self.slot_bytes)
        for other, num_bytes, _ in self.pairs:
            yield Sent((rank, other), num_bytes)

    @property
    def tag(self) -> int:
        """The same on all ranks, and different for different collectives."""
        text = f"{self.number} {self.label} {self.slot_bytes}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


class Work:
    """A job on a `CommStream`.

    ``times`` are when it began and ended: seconds of `time.perf_counter`, or events of a device,
    which have such seconds once they have taken place.
    """

    def __init__(
        self, collective: CollectiveId | None = None, job: Callable[[], None] | None = None
    ) -> None:
        self.collective = collective  # that it ends with
        self.sent: tuple[Sent, ...] = ()  # by its exchanges
        self._job = job  # until it has run
        self.times: tuple[SupportsFloat, SupportsFloat] = (0.0, 0.0)
        self.error: BaseException | None = None
        self.done = False
        # A bare lock: each collective has a work, and an Event takes several times as long.
        self._running = threading.Lock()
        self._running.acquire()

    @property
    def span(self) -> tuple[float, float]:
        """When it ran, in seconds; on a device the host waits until it has."""
        return float(self.times[0]), float(self.times[1])

    def wait(self, timeout_seconds: float = -1) -> bool:
        """Whether the job ended, after at most ``timeout_seconds``; its error is not raised.

        By default, wait until it ends.
        """
        if not self.done and self._running.acquire(timeout=timeout_seconds):
            self._running.release()  # for other waiters
        return self.done

    def run(self) -> None:
        """Run the job, and drop it before any waiter continues; its error is kept."""
        began = time.perf_counter()
        assert self._job is not None
        try:
            self._job()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is needed
            self.error = error
        self._job = None  # and the memory that it holds, or the peak would depend on thread timing
        self.times = (began, time.perf_counter())
        self.done = True
        self._running.release()
