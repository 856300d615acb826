"""Memory that comes and goes without an allocator: flat buffers over a bounded pool.

A `FlatBuffer` is one Storage object for life, and tensors that view it. Its memory is swapped in
from a `Pool` and out again, so everything that holds a view (a parameter, or what autograd saved)
sees the memory that is there now. A fresh 64 MB allocation costs about 33 ms in page faults;
a swap costs nothing.
"""

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.runtime.arena import Arena, Course, aligned
from shardwise.transport.device import host_tensor
from shardwise.transport.host.shared_memory import Claim, CommonMemory, is_offered

__all__ = ["CAN_SWAP", "FlatBuffer", "Pool", "Pools", "is_shared"]


# How much larger than what is asked for memory may be. With twice as large, the scratch of a
# reduction (half a unit on two ranks) took whole units just when everything was in use: 20 % more
# at the peak, and steps of units of unlike sizes were no faster for it (docs/log.md).
_SLACK = 1 + 1 / 64

CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # private, and new in torch 2.13


class Tally:
    """Bytes that are lent, by one pool or by several."""

    def __init__(self) -> None:
        self.lent_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.lent_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)


class Pool:
    """Memory of one device, to be lent, given back and lent again.

    At first it keeps blocks, of which those that lay idle longest make room for others. Whenever
    all is given back, as between steps, and some of it had to be allocated, places in one arena are
    planned for what was taken. So a step that repeats allocates nothing. One that is not to
    ``keep`` its memory has blocks alone, of which no more lie idle than are lent.

    When all is given back it holds no more than was once lent at the same time (and 1/64); nor
    does it otherwise, but for the holes of the arena in a step that is unlike those before. All
    sizes are rounded up to a multiple of 64 bytes.

    What is lent of ``common`` memory may be written to by other ranks once it was given back.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_pinned: bool = False,
        keep: bool = True,
        together: Tally | None = None,  # with other pools
        common: CommonMemory | None = None,
    ) -> None:
        self.device = device
        self.common = common
        self.in_use = 0  # flat buffers: the same number on ranks where the same ones are
        self._own = Tally()
        self._tallies = (self._own,) if together is None else (self._own, together)
        self._keep = keep
        self._is_pinned = is_pinned
        self._idle: list[torch.UntypedStorage] = []  # blocks, oldest first
        self._arena: Arena | None = None
        # Without swapping, buffers get their memory from the allocator all the same.
        self._course = Course() if keep and CAN_SWAP else None  # None: blocks alone
        self._is_last_course = False
        self._has_missed = False  # in this course
        self._block_bytes = 0  # lent

    @property
    def held_bytes(self) -> int:
        """What is lent and what is idle."""
        arena_bytes = self._arena.num_bytes if self._arena is not None else 0
        return arena_bytes + self._block_bytes + sum(block.nbytes() for block in self._idle)

    @property
    def peak_bytes(self) -> int:
        """The most that was lent at once."""
        return self._own.peak_bytes

    @property
    def lent_bytes(self) -> int:
        return self._own.lent_bytes

    @property
    def idle_storages(self) -> list[torch.UntypedStorage]:
        """Through which no tensor sees memory now."""
        return [*self._idle, *(self._arena.idle_storages if self._arena is not None else ())]

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Memory of at least ``num_bytes``; what is in it is undefined."""
        if not num_bytes:
            return _allocate(0, self.device)
        num_bytes = aligned(num_bytes)
        storage = self._carve(num_bytes)
        if storage is None:
            storage = self._take_block(num_bytes)
            self._block_bytes += storage.nbytes()
        if self._course is not None:
            self._course.note_taken(num_bytes, storage)
        self._count(storage.nbytes())
        return storage

    def take_tensor(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor [num_elements] of memory of the pool; give back its storage."""
        storage = self.take(num_elements * dtype.itemsize)
        with torch.inference_mode(mode=False):  # a link writes to it, on a thread of its own
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                storage, 0, (num_elements,), (1,)
            )

    def give(self, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        if self._arena is not None and self._arena.owns(storage):
            self._arena.give(storage)
        else:
            self._block_bytes -= storage.nbytes()
            self._idle.append(storage)
        self._end_loan(storage)

    def write_off(self, storage: torch.UntypedStorage) -> None:
        """Memory that was lent has come to belong to others."""
        if self._arena is not None and self._arena.owns(storage):
            self._is_last_course = True  # or they would have the whole of each arena with it
        else:
            self._block_bytes -= storage.nbytes()
        self._end_loan(storage)

    def _end_loan(self, storage: torch.UntypedStorage) -> None:
        self._count(-storage.nbytes())
        if self._course is not None:
            self._course.note_given(storage)
            if not self.lent_bytes:
                self._end_course(self._course)
        self._trim()

    def _count(self, num_bytes: int) -> None:
        for tally in self._tallies:
            tally.add(num_bytes)

    def _end_course(self, course: Course) -> None:
        placement = course.end(plan=self._has_missed)
        if self._is_last_course:
            self._course = self._arena = None
        elif self._has_missed and placement is not None:
            self._enlarge_arena(placement.extent)
        self._has_missed = False

    def _enlarge_arena(self, num_bytes: int) -> None:
        present = self._arena.num_bytes if self._arena is not None else 0
        if present < num_bytes <= self.peak_bytes * _SLACK:
            self._arena = None
            self._idle.clear()
            self._arena = Arena(self._allocate(num_bytes))

    def _carve(self, num_bytes: int) -> torch.UntypedStorage | None:
        place = self._course.next_place(num_bytes) if self._course is not None else None
        return self._arena.take(num_bytes, place) if self._arena is not None else None

    def _take_block(self, num_bytes: int) -> torch.UntypedStorage:
        most = int(num_bytes * _SLACK)
        fitting = [s for s in self._idle if num_bytes <= s.nbytes() <= most]
        if fitting:
            storage = min(fitting, key=lambda s: s.nbytes())
            self._idle = [idle for idle in self._idle if idle is not storage]
            return storage
        self._has_missed = True
        self._trim(room_for=num_bytes)
        return self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> torch.UntypedStorage:
        if self._is_pinned:
            return host_tensor(num_bytes, torch.uint8, pinned=True).untyped_storage()
        if self.common is not None:
            return self.common.allocate(num_bytes)
        return _allocate(num_bytes, self.device)

    def _trim(self, room_for: int = 0) -> None:
        limit = max(self.peak_bytes, self.lent_bytes + room_for)
        if not self._keep:
            limit = min(limit, 2 * self.lent_bytes + room_for)
        while self._idle and self.held_bytes + room_for > limit:
            del self._idle[0]
        # No arena is as tight as the peak if no placement is.
        limit = max(limit, int(self.peak_bytes * _SLACK))
        if self._arena is not None and self._arena.is_idle and self.held_bytes + room_for > limit:
            self._arena = None


class Pools:
    """Where a step's memory comes from.

    Gathered units may be in memory that all ranks they are gathered from have in common. Small ones
    are in this rank's own, and those that are gathered again from a part of them, with that part.

    Gradients are whole in backward alone. What they take would lie idle just when activations are
    at their most, so it is taken when backward begins and given back when it ends. What units that
    enclose others take may be lent all the time, and says nothing of how much is used again soon.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        has_common = is_offered and CAN_SWAP and device.type == "cpu"
        self.gathered = Pool(device, common=CommonMemory() if has_common else None)
        self.own = Pool(device)
        self._of_gradients = Tally()
        self.gradients = Pool(device, keep=False, together=self._of_gradients)
        self.outer_gradients = Pool(device, keep=False, together=self._of_gradients)

    def __iter__(self) -> Iterator[Pool]:
        return iter((self.gathered, self.own, self.gradients, self.outer_gradients))

    @property
    def peak_bytes(self) -> int:
        """The most that was lent for parameters, and the most for gradients."""
        of_parameters = self.gathered.peak_bytes + self.own.peak_bytes
        return of_parameters + self._of_gradients.peak_bytes


class FlatBuffer:
    """The flat buffer of a layout: ``flat`` [world_size * S] and one view for each parameter.

    ``flat`` and the views may be kept for ever and read between `acquire` and `release`; with
    ``owns_memory`` they may be read at any time, and neither is called.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        *,
        dtype: str | None = None,
        owns_memory: bool = False,
    ) -> None:
        self.layout = layout
        of: torch.dtype = getattr(torch, dtype or layout.dtype)
        self._num_bytes = layout.num_elements * of.itemsize
        self._pool = pool
        self._lent: torch.UntypedStorage | None = None
        self._is_borrowed = True  # from the pool
        self._elsewhere: torch.UntypedStorage | None = None  # memory that is not the pool's
        self._key = zlib.crc32(repr([extent.parameter.names for extent in layout.extents]).encode())
        storage = _allocate(self._num_bytes, pool.device)
        self.flat = torch.empty(0, dtype=of, device=storage.device).set_(
            storage, 0, (layout.num_elements,), (1,)
        )
        # `.data`: a version counter of its own, so refilling the buffer does not look to autograd
        # like a change of what it saved; and no reference to `flat`.
        self.views = tuple(self._view(extent) for extent in layout.extents)
        self._storage = storage
        if owns_memory:
            self.flat.zero_()
        else:
            _swap(storage, _allocate(0, storage.device))

    @property
    def is_acquired(self) -> bool:
        return self._lent is not None

    def slot_of(self, rank: int) -> Tensor:
        """The part [S] of ``flat`` that ``rank`` owns."""
        size = self.layout.shard_elements
        return self.flat[rank * size : (rank + 1) * size]

    def acquire(self, memory: torch.UntypedStorage | None = None) -> None:
        """Give the buffer memory, which it empties until `release`; what is in it is undefined.

        Args:
            memory: of its size; by default the pool's.
        """
        assert self._lent is None, "acquired twice"
        assert memory is None or (CAN_SWAP and memory.nbytes() == self._num_bytes)
        self._is_borrowed = memory is None
        self._lent = self._pool.take(self._num_bytes) if memory is None else memory
        self._pool.in_use ^= self._key
        _swap(self._storage, self._lent)

    def claim(self) -> Claim | None:
        """What lets ranks that gather it do so in common memory; None: they cannot."""
        common, num_bytes = self._pool.common, self._num_bytes
        if common is None or not num_bytes:
            return None
        return Claim(
            common.word(self._storage.data_ptr(), self._pool.in_use),
            lambda process, word: self._move(common.open(process, word, num_bytes)),
            lambda: self._move(_allocate(num_bytes, self._pool.device)),
        )

    def release(self) -> None:
        """Take its memory away."""
        assert self._lent is not None, "released without being acquired"
        if self._elsewhere is not None:
            _swap(self._storage, self._elsewhere)
            self._elsewhere = None
        else:
            _swap(self._storage, self._lent)
        if self._is_borrowed:
            self._pool.give(self._lent)
        self._pool.in_use ^= self._key
        self._lent = None

    def _move(self, elsewhere: torch.UntypedStorage) -> None:
        """Leave the memory that it was given as it is, for other memory."""
        assert self._lent is not None
        self._elsewhere = elsewhere
        _swap(self._storage, self._lent)
        _swap(self._storage, elsewhere)

    def _view(self, extent: ParameterExtent) -> Tensor:
        return self.flat[extent.offset : extent.stop].view(extent.parameter.shape).data


def is_shared(tensor: Tensor, own_references: int) -> bool:
    """Whether tensors other than ``own_references`` known ones hold the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    # There is no public count; torch's own CUDA graph pools ask in the same way.
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > own_references + 1  # `storage` itself


def _allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two Storages, one of which is empty."""
    if CAN_SWAP:
        one._swap_data_ptr_(other)  # type: ignore[attr-defined]
        return
    # The same through the allocator.
    num_bytes = max(one.nbytes(), other.nbytes())
    full, empty = (one, other) if one.nbytes() else (other, one)
    full.resize_(0)
    empty.resize_(num_bytes)
