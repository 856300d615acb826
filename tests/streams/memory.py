"""Device and host memory by address: which operations used which bytes, and in which order."""

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tests.streams.clock import Timeline

__all__ = ["HOST", "PINNED", "Access", "Block", "Memory", "Place", "byte_runs"]

Run = tuple[int, int]  # addresses: the first, and one past the last
_MOST_RUNS = 4096


@dataclass(frozen=True)
class Place:
    """The place of a storage."""

    device: torch.device
    is_pinned: bool = False

    @cached_property
    def is_device(self) -> bool:
        return self.device.type != "cpu"


HOST = Place(torch.device("cpu"))
PINNED = Place(torch.device("cpu"), is_pinned=True)


@dataclass(frozen=True, slots=True)
class Access:
    """The bytes that one operation read or wrote."""

    timeline: Timeline
    number: int  # of the operation on its timeline
    runs: tuple[Run, ...]
    is_write: bool
    what: str

    @property
    def bounds(self) -> Run:
        return self.runs[0][0], self.runs[-1][1]

    def conflicts_with(self, other: "Access") -> bool:
        if self.timeline is other.timeline or not (self.is_write or other.is_write):
            return False
        return _overlap(self.runs, other.runs)

    def happened_before(self, timeline: Timeline) -> bool:
        """Whether it is ordered before all later operations of ``timeline``."""
        return self.number <= timeline.clock.get(self.timeline.number, 0)

    def __str__(self) -> str:
        verb = "writes" if self.is_write else "reads"
        return (
            f"{self.what} on {self.timeline} {verb} bytes {self.bounds[0]:#x}-{self.bounds[1]:#x}"
        )


@dataclass(eq=False)
class Block:
    """One allocation."""

    start: int
    stop: int
    place: Place
    owner: Timeline  # that allocated it, and may reuse the memory after the block is freed
    made_by: str
    accesses: list[Access] = field(default_factory=list)
    window: str | None = None  # if it is registered; "" if it is not symmetric
    is_recorded: bool = False  # by `Tensor.record_stream`, so the allocator waits for other streams


class Memory:
    """All blocks, and the storages that hold them."""

    def __init__(self, on_free: Callable[[Block], None]) -> None:
        self._on_free = on_free
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}  # by start
        self._held: dict[int, Block | None] = {}  # by storage
        self._places: dict[int, Place] = {}  # by storage
        self._finalizers: list[weakref.finalize[..., torch.UntypedStorage]] = []

    @property
    def device_bytes(self) -> int:
        """The bytes of all blocks on devices."""
        return sum(b.stop - b.start for b in self._blocks.values() if b.place.is_device)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._places

    def add(
        self, storage: torch.UntypedStorage, place: Place, owner: Timeline, made_by: str
    ) -> None:
        """Add a new storage, with a block if it has memory."""
        key = storage._cdata
        self._watch(storage, place)
        if not storage.nbytes():
            return
        start = storage.data_ptr()
        known = self.block_at(start)
        if known is not None and known not in self._held.values():
            self._remove(known)  # its free was not observed
            known = None
        if known is None:
            self._held[key] = self._insert(
                Block(start, start + storage.nbytes(), place, owner, made_by)
            )

    def place_of(self, storage: torch.UntypedStorage) -> Place | None:
        """Return the place of ``storage``; None if it is new."""
        known = self._places.get(storage._cdata)
        if known is not None:
            return known
        block = self.block_at(storage.data_ptr()) if storage.nbytes() else None
        return None if block is None else block.place

    def block_at(self, address: int) -> Block | None:
        position = bisect_right(self._starts, address)
        block = self._blocks[self._starts[position - 1]] if position else None
        return block if block is not None and address < block.stop else None

    def owned_by(self, timeline: Timeline, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return memory that ``timeline`` allocated; it is not reused before its operations end."""
        blocks = [(one, self.block_at(one.data_ptr())) for one in tensors if one.numel()]
        return [
            one.untyped_storage()
            for one, block in blocks
            if block is not None and block.owner is timeline
        ]

    def swap(self, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Record that two storages have exchanged their memory."""
        a, b = one._cdata, other._cdata
        if not self.knows(other):  # made outside of operators; its memory is freed with it
            self._watch(other, self._places[a])
        self._held[a], self._held[b] = self._held.get(b), self._held.get(a)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int, owner: Timeline) -> None:
        """Give ``storage`` other memory, of the stream that is current, or none."""
        key = storage._cdata
        block, place = self._held.pop(key, None), self._places[key]
        if block is not None:
            self._remove(block)
            self._on_free(block)
        storage.resize_(num_bytes)
        start, self._held[key] = storage.data_ptr(), None
        if num_bytes:
            block = Block(start, start + num_bytes, place, owner, "a resized storage")
            self._held[key] = self._insert(block)

    def close(self) -> None:
        """Ignore frees from now on."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def _watch(self, storage: torch.UntypedStorage, place: Place) -> None:
        """Notice when ``storage``, which has no block yet, is freed."""
        key = storage._cdata
        self._places[key] = place
        self._held[key] = None
        self._finalizers.append(weakref.finalize(storage, self._drop, key))

    def _insert(self, block: Block) -> Block:
        for stale in list(self._within(block.start, block.stop)):
            self._remove(stale)  # its free was not observed
        self._blocks[block.start] = block
        insort(self._starts, block.start)
        return block

    def _within(self, start: int, stop: int) -> Iterator[Block]:
        position = bisect_right(self._starts, start)
        while position < len(self._starts) and self._starts[position] < stop:
            yield self._blocks[self._starts[position]]
            position += 1

    def _remove(self, block: Block) -> None:
        if self._blocks.get(block.start) is block:
            del self._blocks[block.start]
            self._starts.remove(block.start)

    def _drop(self, key: int) -> None:
        self._places.pop(key, None)
        block = self._held.pop(key, None)
        if block is not None:
            self._remove(block)
            self._on_free(block)


def byte_runs(tensor: Tensor) -> tuple[Run, ...]:
    """Return the bytes of ``tensor`` in ascending order; nothing if it is empty."""
    if not tensor.numel():
        return ()
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return ((start, start + tensor.numel() * tensor.element_size()),)
    dims = sorted(
        (
            (stride, size)
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            if size > 1 and stride > 0
        )
    )
    width, rest = 1, list[tuple[int, int]]()
    for stride, size in dims:
        if not rest and stride <= width:
            width = stride * (size - 1) + width
        else:
            rest.append((stride, size))
    starts = [0]
    for stride, size in rest:
        if len(starts) * size > _MOST_RUNS:
            width += stride * (size - 1)  # too many runs: include the bytes between them
        else:
            starts = [start + i * stride for start in starts for i in range(size)]
    base, itemsize = tensor.data_ptr(), tensor.element_size()
    return tuple(
        (base + start * itemsize, base + (start + width) * itemsize) for start in sorted(starts)
    )


def _overlap(one: Sequence[Run], other: Sequence[Run]) -> bool:
    if one[-1][1] <= other[0][0] or other[-1][1] <= one[0][0]:
        return False
    if len(one) == len(other) == 1:
        return True
    # Runs of one operation hardly overlap, so comparing neighbors in the merged order suffices.
    merged = sorted([(*run, 0) for run in one] + [(*run, 1) for run in other])
    reach = [0, 0]
    for start, stop, which in merged:
        if start < reach[1 - which]:
            return True
        reach[which] = max(reach[which], stop)
    return False
