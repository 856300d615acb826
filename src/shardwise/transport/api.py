"""The interface of this package: groups of ranks, their collectives, and the work that these are.

A `Collectives` is one queue of them: `host.collectives` on CPUs, `process_group` on any backend.
"""

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from shardwise.transport.host.shared_memory import SharedRange

__all__ = [
    "Capabilities",
    "CollectiveId",
    "Collectives",
    "CommStream",
    "Operation",
    "RankGroup",
    "Reduction",
    "Stage",
    "Work",
]


class Operation(StrEnum):
    """A collective operation on one tensor."""

    ALL_GATHER = "all_gather"
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
    inner: (
        Tensor  # [M], for the sum of the first stage; may be `out`, or this rank's slot of `flat`
    )
    carried: Tensor | None  # [M], an earlier sum of the first stage, to be added
    out: Tensor | None  # for the sum of the last stage; None: the sum stays in `inner`
    scratch: Tensor  # [Capabilities.reduction_scratch]
    stages: tuple[Stage, ...]
    scale: float = 1.0  # of `out`, applied in its own dtype

    @property
    def is_cast(self) -> bool:
        """Whether the sum ends in another dtype than that of its addends."""
        return self.out is not None and self.out.dtype != self.flat.dtype

    def scattered(self, group: RankGroup) -> Tensor:
        """Where the sum of a later reduce-scatter over ``group`` goes: this rank's part [S]."""
        if self.out is None or self.is_cast:
            return self.inner.view(group.size, -1)[group.index]
        return self.out


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """One collective: the ``number``-th of its queue, among ``ranks``.

    ``slot_bytes`` pass between any two of the ranks.
    """

    number: int
    label: str
    slot_bytes: int
    ranks: tuple[int, ...] = ()
    is_shared: bool = False  # it may take place in shared memory

    @property
    def tag(self) -> int:
        """The same on all ranks, and different for different collectives."""
        text = f"{self.number} {self.label} {self.slot_bytes}"
        return zlib.crc32(text.encode()) & 0x7FFFFFFF


_WHOLE_ELEMENTS = 1 << 14  # an all-reduce of fewer is one exchange of all


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, and the memory that it takes."""

    point_to_point: bool = False  # ranks exchange tensors directly, and may be out of step
    reads_memory: bool = False  # ranks read each other's memory: no scratch
    stream_ordered: bool = False  # works are ordered by a device's streams

    def scratch_elements(
        self, operation: Operation, num_elements: int, num_ranks: int, *, in_place: bool
    ) -> int:
        """The scratch of one operation on ``num_elements``.

        Args:
            operation: an all-gather takes none.
            num_elements: of its input.
            num_ranks: of its group.
            in_place: the sum of a reduce-scatter goes to this rank's slot of the input. Memory of
                its own could be used to receive from one of the other ranks.
        """
        if not self.point_to_point or self.reads_memory or operation is Operation.ALL_GATHER:
            return 0
        if operation is Operation.REDUCE_SCATTER:
            received = num_ranks - 1 if in_place else num_ranks - 2
            return max(received, 0) * (num_elements // num_ranks)
        is_cut = all_reduce_is_cut(num_elements, num_ranks)
        return (num_ranks - 1) * (num_elements // num_ranks if is_cut else num_elements)

    def reduction_scratch(
        self, num_elements: int, stages: tuple[Stage, ...], *, is_cast: bool = False
    ) -> int:
        """The scratch of a `Reduction` of ``num_elements``, or of one whose sum ``is_cast``."""
        most = 0
        for position, stage in enumerate(stages):
            is_last = position == len(stages) - 1 or stages[-1].operation is Operation.ALL_REDUCE
            in_place = is_cast or not is_last
            size = stage.group.size
            needed = self.scratch_elements(stage.operation, num_elements, size, in_place=in_place)
            most = max(most, needed)
            if stage.operation is Operation.REDUCE_SCATTER:
                num_elements //= size
        return most


def all_reduce_is_cut(num_elements: int, num_ranks: int) -> bool:
    """Whether an all-reduce is a reduce-scatter and an all-gather, or one exchange of the whole."""
    return num_elements >= max(_WHOLE_ELEMENTS, num_ranks**2)


class Work:
    """A job on a `CommStream`; ``span`` is when it ran, in seconds of `time.perf_counter`."""

    def __init__(self, collective: CollectiveId | None = None) -> None:
        self.collective = collective  # that it ends with
        self.span = (0.0, 0.0)
        self.error: BaseException | None = None
        self.done = False
        # A bare lock: each collective has a work, and an Event takes several times as long.
        self._running = threading.Lock()
        self._running.acquire()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether the job ended, after at most ``timeout_seconds``; its error is not raised."""
        if not self.done and self._running.acquire(timeout=timeout_seconds):
            self._running.release()  # for other waiters
        return self.done

    def wait_on_device(self) -> None:
        """Have the current stream wait for it; on the CPU, the caller."""
        self._join()

    def synchronize(self) -> None:
        """Return when the host may read what the job wrote, or raise the job's error."""
        self._join()
        if self.error is not None:
            raise self.error

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, and drop it before any waiter continues."""
        with self.running():
            job()
            del job  # and the memory that it holds, or the peak would depend on thread timing

    @contextlib.contextmanager
    def running(self) -> "Iterator[Work]":
        """The job is the body of the ``with``; what it raises becomes the ``error``."""
        began = time.perf_counter()
        try:
            yield self
        except Exception as error:  # noqa: BLE001 - it is raised where the result is needed
            self.error = error
        self.span = (began, time.perf_counter())
        self.done = True
        self._running.release()

    def _join(self) -> None:
        if not self.done:
            with self._running:
                pass


class CommStream(Protocol):
    """Jobs in order, concurrent with the caller."""

    def submit(self, job: Callable[[], None]) -> Work:
        """Run ``job`` after all that the caller has computed and all that was submitted before."""
        ...


class Collectives(Protocol):
    """Collectives of one kind, which run one after the other."""

    @property
    def world(self) -> RankGroup:
        """All ranks that may take part."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def stream(self) -> CommStream:
        """Where they run."""
        ...

    @property
    def sent(self) -> tuple[int, int]:
        """Exchanges so far, and the bytes that this rank sent in them; not those of a backend."""
        ...

    def all_gather(
        self,
        flat: Tensor,
        group: RankGroup,
        label: str,
        fill: Callable[[], None] | None = None,
        shared: SharedRange | None = None,
    ) -> Work:
        """Give every rank of ``group`` the whole of ``flat``.

        Args:
            flat: [ranks * S], of which this rank contributes its slot [S].
            group: the ranks that take part.
            label: its name in the ledger.
            fill: writes this rank's slot, just before it is sent; None if it is written already.
            shared: where ``flat`` is in shared memory; for all ranks of the group or none.
        """
        ...

    def reduce(self, reduction: Reduction, label: str) -> Work:
        """Sum over all ranks of the stages, one after the other."""
        ...

    def exchange(self, pairs: Mapping[int, tuple[Tensor, Tensor]], label: str) -> Work:
        """Send the first of each pair to its rank, and receive the second from it."""
        ...
