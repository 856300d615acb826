"""Memory pools for flat buffers and gradients.

A fresh allocation of 64 MB costs about 33 ms in page faults. Swapping memory of a pool into a
buffer costs nothing. Gathered parameters are in an `Arena`, at offsets planned from the first
steps. Whole gradients are in a `Pool` of blocks.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardwise._private import can_swap_storages, num_storage_references, storage_id, swap_storages
from shardwise.comm.api import MemoryKind, SharedMemory
from shardwise.comm.communicator import new_shared_memory
from shardwise.comm.device import join_streams
from shardwise.errors import StepError
from shardwise.schedule.memory import MemoryPlan

__all__ = ["CAN_SWAP", "Arena", "Pool", "Pools", "is_shared", "swap_memory"]

ALIGNMENT = 64  # bytes: a cache line, and enough for vector loads
# How much larger than the request a block may be. When twice the size was allowed, the scratch of a
# reduction (half a unit on two ranks) took whole units just when everything was in use: 20 % more
# at the peak, and steps of units of different sizes were no faster (docs/log.md).
_SLACK = 1 + 1 / 64

CAN_SWAP = can_swap_storages()


Allocator = Callable[[int, str], torch.UntypedStorage]  # (num_bytes, purpose)


class PeakCounter:
    """The bytes that one pool, or several, have allocated, now and at most."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)


class Pool(PeakCounter):
    """Reusable blocks of memory of one device.

    A pool never holds more than was once allocated at the same time: the blocks that have been idle
    longest are freed. Without ``keep``, it has no more idle than allocated memory.
    All sizes are rounded up to a multiple of 64 bytes.
    """

    shared: SharedMemory | None = None  # set if other ranks can write to the memory
    allocator: Allocator | None = None  # of an arena: allocates memory that a backend registers

    def __init__(
        self,
        device: torch.device,
        *,
        is_pinned: bool = False,
        keep: bool = True,
        together: PeakCounter | None = None,  # counts several pools
    ) -> None:
        super().__init__()
        self.device = device
        self._together = together
        self._keep = keep
        self._is_pinned = is_pinned
        self._idle: list[torch.UntypedStorage] = []  # oldest first
        self._block_bytes = 0  # of allocated blocks

    @property
    def held_bytes(self) -> int:
        """Allocated and idle bytes."""
        return self._block_bytes + sum(map(torch.UntypedStorage.nbytes, self._idle))

    def allocate(self, num_bytes: int, name: str = "") -> torch.UntypedStorage:
        """At least ``num_bytes``, or 0, of memory with undefined content.

        An `Arena` plans an offset for each ``name`` of a buffer.
        """
        if not num_bytes:
            return _allocate(0, self.device)
        storage = self._take(aligned(num_bytes), name)
        self.add(storage.nbytes())
        join_streams(self.device)  # any of them may have used the memory before
        return storage

    def allocate_tensor(self, num_elements: int, dtype: torch.dtype, name: str = "") -> Tensor:
        """A tensor [num_elements] in memory of the pool; pass its storage to `free`."""
        storage = self.allocate(num_elements * dtype.itemsize, name)
        # The thread of a collective writes to it, so it must not be an inference tensor.
        with torch.inference_mode(mode=False):
            return torch.empty(0, dtype=dtype, device=self.device).set_(
                storage, 0, (num_elements,), (1,)
            )

    def free(self, storage: torch.UntypedStorage, *, to_allocator: bool = False) -> None:
        """Free an allocated block, and keep it for later allocations unless ``to_allocator``."""
        if storage.nbytes():
            join_streams(self.device, mutually=True)
            self.add(-storage.nbytes())
            self._give_back(storage)
            self._trim()
        if to_allocator:
            self._idle = [idle for idle in self._idle if idle is not storage]

    def free_idle(self) -> None:
        """Free all memory that is not allocated."""
        self._idle.clear()

    def new_storage(self, num_bytes: int) -> torch.UntypedStorage:
        """Memory of the device outside the pool."""
        return _allocate(num_bytes, self.device)

    def disown(self, storage: torch.UntypedStorage) -> None:
        """Give up an allocated block, which now belongs to its other holders."""
        self.add(-storage.nbytes())
        self._block_bytes -= storage.nbytes()

    def add(self, num_bytes: int) -> None:
        super().add(num_bytes)
        if self._together is not None:
            self._together.add(num_bytes)

    def _take(self, num_bytes: int, name: str) -> torch.UntypedStorage:  # noqa: ARG002
        """Get an idle block that fits, or a new one."""
        largest = int(num_bytes * _SLACK)
        fitting = [s for s in self._idle if num_bytes <= s.nbytes() <= largest]
        if fitting:
            storage = min(fitting, key=lambda s: s.nbytes())
            self._idle = [idle for idle in self._idle if idle is not storage]
        else:
            self._trim(room_for=num_bytes)
            storage = self._new_block(num_bytes)
        self._block_bytes += storage.nbytes()
        return storage

    def _give_back(self, storage: torch.UntypedStorage) -> None:
        self._block_bytes -= storage.nbytes()
        self._idle.append(storage)

    def _new_block(self, num_bytes: int) -> torch.UntypedStorage:
        if self._is_pinned:
            # On the CPU, even if torch has another default device.
            block = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            return block.untyped_storage()
        return _allocate(num_bytes, self.device)

    def _trim(self, room_for: int = 0) -> None:
        limit = max(self.peak_bytes, self.allocated_bytes + room_for)
        if not self._keep:
            limit = min(limit, 2 * self.allocated_bytes + room_for)
        while self._idle and self.held_bytes + room_for > limit:
            del self._idle[0]


class Arena(Pool):
    """One allocation in which each buffer has an offset, planned from the first step.

    An allocation that was not planned gets a separate block, as all do in the first step. The next
    time that everything is free, offsets are planned from the observed allocations, so a repeated
    step allocates nothing.
    Other ranks may write to ``shared`` memory once it is free.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        shared: SharedMemory | None = None,
        together: PeakCounter | None = None,
    ) -> None:
        super().__init__(device, keep=False, together=together)
        self.shared = shared
        self._plan: MemoryPlan[str] = MemoryPlan()
        self._whole: torch.UntypedStorage | None = None  # the one allocation
        self._ranges: dict[str, torch.UntypedStorage] = {}  # parts of it, by buffer
        self._alive: dict[int, str] = {}  # names of buffers, by the ids of their storages
        self.in_use = 0  # XOR of checksums of these names: equal on ranks that have the same ones

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self._arena_bytes

    def _take(self, num_bytes: int, name: str) -> torch.UntypedStorage:
        assert name, "in an arena every buffer has a name"
        while name in self._alive.values():  # sums over rows that a later backward adds up
            name += "+"
        if not self._alive and self._plan.is_stale:  # something new was allocated in the last step
            self._place()
        offset = self._plan.observe(name, num_bytes, self._alive.values())
        # Without swapping, buffers get their memory from the allocator anyway.
        if offset is None or not CAN_SWAP:
            storage = super()._take(num_bytes, name)
        else:
            storage = self._range(name, offset, num_bytes)
        self._alive[storage_id(storage)] = name
        self.in_use ^= zlib.crc32(name.encode())
        return storage

    def _give_back(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self.in_use ^= zlib.crc32(self._alive.pop(storage_id(storage)).encode())
        start = 0 if self._whole is None else self._whole.data_ptr()
        if not start <= address < start + self._arena_bytes:
            super()._give_back(storage)

    @property
    def _arena_bytes(self) -> int:
        return 0 if self._whole is None else self._whole.nbytes()

    def _place(self) -> None:
        """Plan offsets within the peak of allocated bytes (plus 1/64).

        Memory from an allocator may be larger, because all buffers must be in it.
        """
        most = self.peak_bytes
        self._plan.update(most, int(most * _SLACK) if self.allocator is None else sys.maxsize)
        self._ranges.clear()
        if self._arena_bytes != self._plan.extent or self.allocator is not None:
            self._whole = None
            self._idle.clear()

    def _range(self, name: str, offset: int, num_bytes: int) -> torch.UntypedStorage:
        if self._whole is None:
            size = self._plan.extent
            if self.allocator is not None:
                self._whole = self.allocator(size, f"offsets {self._plan.offsets}")
            else:
                self._whole = self._new_block(size)
        if name not in self._ranges:  # a separate Storage, which keeps the whole alive
            part: Any = self._whole[offset : offset + num_bytes]
            self._ranges[name] = part
        return self._ranges[name]

    def use(self, allocator: Allocator | None) -> None:
        """Between steps: get the one allocation from ``allocator``; None: from the device's own."""
        if self.allocated_bytes:
            raise StepError(
                "the memory of collectives cannot be replaced while parameters are gathered or "
                "gradients are not reduced; choose it before the first forward"
            )
        self.allocator = allocator
        self.free_idle()

    def free_idle(self) -> None:
        super().free_idle()
        if not self._alive:
            self._whole = None
            self._ranges.clear()
            if self.shared is not None:
                # It also forgets the memory of other ranks.
                self.shared = new_shared_memory(self.device)

    def _new_block(self, num_bytes: int) -> torch.UntypedStorage:
        if self.shared is not None:
            return self.shared.allocate(num_bytes)
        return super()._new_block(num_bytes)


class Pools:
    """The pools of one model on this rank.

    Ranks may gather into shared memory once all of them have freed the range. Private memory is
    used for small units, for units that are gathered again from a part (and for the part), and for
    units with other ranks than the model.

    Gradients are whole only in backward. Their memory would be idle just when activations are at
    their peak, so it is allocated when backward begins and freed when it ends. Units with child
    units have a pool of their own, because they may hold gradients all the time, and its peak does
    not show how much memory is soon reused.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gathered = Arena(device, shared=new_shared_memory(device) if CAN_SWAP else None)
        self.own = Arena(device)
        self.of_gradients = PeakCounter()
        self.gradients = Pool(device, keep=False, together=self.of_gradients)
        self.enclosing_gradients = Pool(device, keep=False, together=self.of_gradients)
        # In place of both if a backend registers the memory, which is then held all the time.
        self.registered_gradients = Arena(device, together=self.of_gradients)
        self.kind = MemoryKind.OWN

    def __iter__(self) -> Iterator[Pool]:
        gradients = (self.gradients, self.enclosing_gradients, self.registered_gradients)
        return iter((self.gathered, self.own, *gradients))

    def use(
        self, kind: MemoryKind, gathers: Allocator | None, reductions: Allocator | None
    ) -> None:
        """Between steps: switch collectives to memory of this kind."""
        self.gathered.use(gathers)
        self.own.use(gathers)
        self.registered_gradients.use(reductions)
        self.kind = kind

    @property
    def peak_bytes(self) -> int:
        """The sum of the peaks for parameters and for gradients."""
        of_parameters = self.gathered.peak_bytes + self.own.peak_bytes
        return of_parameters + self.of_gradients.peak_bytes


def is_shared(tensor: Tensor, own_references: int) -> bool:
    """Whether more than ``own_references`` tensors hold the storage of ``tensor``."""
    storage = tensor.untyped_storage()
    # The variable `storage` is one more reference.
    return num_storage_references(storage) > own_references + 1


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(num_bytes, device=device)  # type: ignore[no-untyped-call]


def swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages, one of which is empty."""
    if CAN_SWAP:
        swap_storages(one, other)
        return
    # The same through the allocator, without the content. A storage that NumPy has viewed cannot be
    # resized. It keeps its memory, and then neither of the two is empty.
    full, empty = (one, other) if one.nbytes() else (other, one)
    if not empty.nbytes():
        num_bytes = full.nbytes()
        if full.resizable():
            _resize(full, 0)
        _resize(empty, num_bytes)


def _resize(storage: torch.UntypedStorage, num_bytes: int) -> None:
    storage.resize_(num_bytes)
