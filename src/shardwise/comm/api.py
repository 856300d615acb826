"""Groups of ranks, descriptions of collectives, and handles of asynchronous work."""

import hashlib
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._private import process_group_named

__all__ = [
    "SMALL_BYTES",
    "CollectiveId",
    "Hop",
    "MemoryKind",
    "Operation",
    "QueueObserver",
    "RankGroup",
    "Reduction",
    "Sent",
    "SharedBuffer",
    "SharedMemory",
    "Stage",
    "Step",
    "Work",
    "all_reduce_bytes",
]

SMALL_BYTES = 1 << 15  # between CPUs, smaller tensors are sent with the first message


class Operation(StrEnum):
    """A way to sum over ranks."""

    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class MemoryKind(StrEnum):
    """The memory of the buffers of collectives."""

    OWN = "own"  # from torch's allocator
    REGISTERED = "registered"  # from the backend's own allocator
    # Torch's ``symm_mem``, through NCCL: the same offset in one window on all ranks, which allocate
    # it together and in the same order.
    SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class RankGroup:
    """The ranks that take part in a collective, in the order of their slots.

    Slot i of a gathered or reduced tensor belongs to ``ranks[i]``. Ranks are numbered within
    ``parent``, the process group of the whole mesh.
    """

    ranks: tuple[int, ...]
    own_rank: int
    parent: dist.ProcessGroup | None = None  # None: one process, or a forecast
    # In a group of all ranks: whether gathers and reductions share one queue and its communicators.
    has_one_queue: bool = field(default=False, compare=False)

    @cached_property
    def index(self) -> int:
        """The slot of this rank."""
        return self.ranks.index(self.own_rank)

    @cached_property
    def digest(self) -> str:
        """A short key for the ranks; a group may have thousands."""
        return hashlib.sha1(repr(self.ranks).encode(), usedforsecurity=False).hexdigest()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def others(self) -> tuple[tuple[int, int], ...]:
        """Slot and rank of every other member."""
        return tuple((i, rank) for i, rank in enumerate(self.ranks) if rank != self.own_rank)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of ``parent``, as torch's meshes do; without it, this loads with None."""
        name = None if self.parent is None else self.parent.group_name
        return _group_named, (name, self.ranks, self.own_rank, self.has_one_queue)

    def select(self, *ranks: int) -> "RankGroup":
        """Return a group of other ranks of the same parent, including this rank."""
        return RankGroup(ranks, self.own_rank, self.parent)


def _group_named(name: str | None, *fields: Any) -> RankGroup:
    ranks, own_rank, has_one_queue = fields
    parent = None
    if name is not None:
        with suppress(RuntimeError):  # there is no such group in this process
            parent = process_group_named(name)
    return RankGroup(ranks, own_rank, parent, has_one_queue=has_one_queue)


torch.serialization.add_safe_globals([_group_named])  # `torch.load` refuses others by default


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a reduction."""

    operation: Operation
    group: RankGroup


@dataclass(frozen=True, slots=True)
class Reduction:
    """The memory and the stages of one reduction.

    A reduce-scatter over n ranks leaves 1/n of the sum on each rank; an all-reduce leaves the whole
    sum, with the same bits on every rank.
    """

    flat: Tensor  # [n * M], this rank's addend
    inner: Tensor  # [M], for the sum of the first stage; may be `out`, or our slot of `flat`
    carried: Tensor | None  # [M], an earlier sum of the first stage, which is added
    out: Tensor | None  # for the sum of the last stage; None: the sum stays in `inner`
    stages: tuple[Stage, ...]  # one or two
    scale: float = 1.0  # factor of `out`; applied in its dtype, or earlier if the bits are the same
    only_sums: bool = False  # use no other operator of the backend than SUM
    reduces_within_flat: bool = False  # no collective writes to `out`
    in_tree: bool = False  # each stage sums in a binary tree over its ranks: (0 + 1) + (2 + 3)

    @property
    def is_cast(self) -> bool:
        """Whether the dtype of ``out`` differs from that of the addends."""
        return self.out is not None and self.out.dtype != self.flat.dtype

    def scattered(self, group: RankGroup) -> Tensor:
        """Return the memory for the result [S] of a second reduce-scatter, over ``group``."""
        if self.out is None or self.is_cast or self.reduces_within_flat:
            return self.inner.view(group.size, -1)[group.index]
        return self.out


@dataclass(frozen=True, slots=True)
class Hop:
    """An exchange of bytes, with functions that encode and decode them.

    ``encode`` fills the bytes to send: [ranks, row_bytes], a row for each rank; or, with
    ``gathers``, [row_bytes], the same for all ranks. ``decode`` is called with the received bytes
    [ranks, row_bytes].
    """

    group: RankGroup
    row_bytes: int
    encode: Callable[[Tensor], None]
    decode: Callable[[Tensor], None]
    gathers: bool = False

    def prepare(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the encoded bytes, and memory for the received ones with this rank's own row."""
        rows = torch.empty((self.group.size, self.row_bytes), dtype=torch.uint8, device=device)
        own = rows[self.group.index]
        if self.gathers:
            self.encode(own)
            return own, rows
        sent = torch.empty_like(rows)
        self.encode(sent)
        own.copy_(sent[self.group.index])
        return sent, rows


Step = Hop | Callable[[], None]  # a part of a collective that has several


class Sent(NamedTuple):
    """The bytes that a rank sends in an exchange: ``num_bytes`` to each of the other ``ranks``."""

    ranks: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """One collective of a queue, among ``ranks``."""

    number: int  # in its group, since the last recovery
    label: str
    slot_bytes: int  # to each other rank; 0 if they differ
    ranks: tuple[int, ...] = ()
    group: str = ""  # digest of the ranks that count it; the key of a creation

    @property
    def tag(self) -> int:
        """A number that is the same on all ranks, and differs between collectives."""
        text = f"{self.number} {self.label} {self.slot_bytes} {self.group}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


class Work:
    """A job on a `CommStream`.

    ``times`` are its begin and end: seconds of `time.perf_counter`, or events of a device that can
    be converted to such seconds once they have completed.
    """

    def __init__(
        self, collective: CollectiveId | None = None, job: Callable[[], None] | None = None
    ) -> None:
        self.collective = collective  # the last one, if the job has several
        self.sent: tuple[Sent, ...] = ()
        self._job = job  # None after it has run
        self.times: tuple[SupportsFloat, SupportsFloat] = (0.0, 0.0)
        self.error: BaseException | None = None
        self.done = False
        # Creating an Event would take several times as long as this lock.
        self._running = threading.Lock()
        self._running.acquire()

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds; on a device, the host waits for the end."""
        return float(self.times[0]), float(self.times[1])

    def wait(self, timeout_seconds: float = -1) -> bool:
        """Wait for the end, by default without a timeout; return whether the job has ended.

        Its error is not raised.
        """
        if not self.done and self._running.acquire(timeout=timeout_seconds):
            self._running.release()  # for other waiters
        return self.done

    def run(self) -> None:
        """Run the job and keep its error. Drops the job before any waiter continues."""
        began = time.perf_counter()
        assert self._job is not None
        try:
            self._job()
        except BaseException as error:  # noqa: BLE001 - raised where the result is needed
            self.error = error
        self._job = None  # frees its memory; otherwise peak memory would depend on thread timing
        self.times = (began, time.perf_counter())
        self.done = True
        self._running.release()


class QueueObserver(Protocol):
    """Follows the collectives of one queue."""

    def issued(self, collective: CollectiveId) -> None:
        """A collective was issued."""

    def ended(self, collective: CollectiveId) -> None:
        """The oldest collective that had not ended has ended."""


class SharedMemory(Protocol):
    """Memory in which the ranks of one host may gather together."""

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate memory whose pages are taken when written to."""


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A buffer that ranks may gather in memory which they share."""

    memory: SharedMemory  # that the buffer is in
    address: int
    num_bytes: int
    in_use: int  # equal on ranks that have the same buffers in use
    # Moves the buffer to other memory; None: to memory of its own.
    replace: Callable[[torch.UntypedStorage | None], None]


def all_reduce_bytes(num_bytes: int, itemsize: int, ranks: int) -> int:
    """Return the bytes that a rank sends to each other rank in an all-reduce.

    It is a reduce-scatter and an all-gather. Small tensors, and the elements that are left over,
    are sent whole to every rank.
    """
    if num_bytes <= SMALL_BYTES:
        return num_bytes
    part = num_bytes // itemsize // ranks * itemsize
    return 2 * part + num_bytes - part * ranks
