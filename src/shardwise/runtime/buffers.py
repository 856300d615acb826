"""Buffers for gathered parameters and for gradients, whose memory comes from a pool.

A `FlatBuffer` keeps one Storage object for its lifetime, with tensors that view it. Memory of a
pool is swapped in and out, so every view (a parameter, or a tensor that autograd saved) sees the
current memory. A `ChunkedBuffer` has two flat buffers and copies between them.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from shardwise._private import foreach_copy_
from shardwise.comm.api import SharedBuffer
from shardwise.plan.chunks import ChunkedLayout, chunk_dim, chunk_of
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.runtime.memory import CAN_SWAP, Arena, Pool, swap_memory

__all__ = ["ChunkedBuffer", "FlatBuffer", "flat_buffer"]


class FlatBuffer:
    """The flat buffer of a layout: ``flat`` [world_size * S] and one view per parameter.

    ``flat`` and the views stay the same objects. They may be read between `acquire` and `release`;
    with ``owns_memory`` neither is called, and they may be read at any time.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        *,
        dtype: str | None = None,
        owns_memory: bool = False,
        suffix: str = "",
    ) -> None:
        self.layout = layout
        of: torch.dtype = getattr(torch, dtype or layout.dtype)
        self.num_bytes = layout.num_elements * of.itemsize
        # Unique in the pool: no other buffer has the parameter.
        self.name = layout.extents[0].parameter.name + suffix
        self._pool = pool
        self._memory: torch.UntypedStorage | None = None  # while acquired
        self._is_from_pool = True
        self._slots: dict[int, Tensor] = {}  # by rank
        self._private: torch.UntypedStorage | None = None  # replaces shared memory
        if owns_memory and pool.allocator is not None:
            storage = pool.allocator(self.num_bytes, self.name)
        else:
            storage = pool.new_storage(self.num_bytes)
        self.flat = torch.empty(0, dtype=of, device=storage.device).set_(
            storage, 0, (layout.num_elements,), (1,)
        )
        # `.data` has its own version counter, so autograd does not notice that the buffer is filled
        # again, and it holds no reference to `flat`.
        in_chunks = isinstance(layout, ChunkedLayout)
        self.views = () if in_chunks else tuple(self._view(extent) for extent in layout.extents)
        self._storage = storage
        if owns_memory:
            self.flat.zero_()
        else:
            swap_memory(storage, pool.new_storage(0))

    @property
    def is_acquired(self) -> bool:
        return self._memory is not None

    @property
    def storages(self) -> tuple[torch.UntypedStorage, ...]:
        """The storages of the parameters."""
        return (self._storage,)

    def slot_of(self, rank: int) -> Tensor:
        """The part [S] of ``flat`` that ``rank`` owns; the buffer must have memory."""
        if rank not in self._slots:
            size = self.layout.shard_elements
            self._slots[rank] = self.flat[rank * size : (rank + 1) * size]
        return self._slots[rank]

    def acquire(self, memory: torch.UntypedStorage | None = None) -> None:
        """Give the buffer memory with undefined content: by default from the pool.

        Other ``memory`` has the buffer's size, and is empty until `release`.
        """
        assert self._memory is None, "acquired twice"
        assert memory is None or (CAN_SWAP and memory.nbytes() == self.num_bytes)
        self._is_from_pool = memory is None
        self._memory = self._pool.allocate(self.num_bytes, self.name) if memory is None else memory
        swap_memory(self._storage, self._memory)

    def take(self, other: "FlatBuffer") -> None:
        """Get the content of ``other`` and, if both use one pool, its memory: it is released."""
        is_movable = CAN_SWAP and other._pool is self._pool and other._is_from_pool
        if not (is_movable and other.is_acquired and other._private is None):
            self.acquire()
            self.flat.copy_(other.flat)
            return
        assert self._memory is None, "acquired twice"
        swap_memory(self._storage, other._storage)
        self._memory, other._memory = other._memory, None
        self._is_from_pool = True

    @property
    def whole(self) -> "FlatBuffer":
        """The buffer that ``views`` view."""
        return self

    def unpack(self) -> None:
        """Does nothing: the views alias ``flat``."""

    def pack(self) -> None:
        """Does nothing: ``flat`` aliases the views."""

    def shared_buffer(self) -> SharedBuffer | None:
        """What ranks need to gather the buffer in shared memory; None if they cannot."""
        shared, num_bytes = self._pool.shared, self.num_bytes
        if shared is None or not num_bytes:
            return None
        assert isinstance(self._pool, Arena), "only an arena is shared"
        address, in_use = self._storage.data_ptr(), self._pool.in_use
        return SharedBuffer(shared, address, num_bytes, in_use, self._use_private)

    def release(self) -> None:
        """Return the memory to where it came from."""
        assert self._memory is not None, "released without being acquired"
        if self._storage.nbytes():  # else it was interrupted after the swap, or `acquire` before it
            swap_memory(self._storage, self._memory if self._private is None else self._private)
        # First, so that no call after an interrupt frees the memory again.
        memory, self._memory, self._private = self._memory, None, None
        if self._is_from_pool:
            # Without swapping, acquiring an idle block would free it and allocate another.
            self._pool.free(memory, to_allocator=not CAN_SWAP)

    def _use_private(self, memory: torch.UntypedStorage | None) -> None:
        """Use ``memory`` until `release`, in place of the acquired memory, which is kept."""
        assert self._memory is not None
        if memory is None:
            memory = self._pool.new_storage(self.num_bytes)
        self._private = memory
        swap_memory(self._storage, self._memory)
        swap_memory(self._storage, memory)

    def _view(self, extent: ParameterExtent) -> Tensor:
        return self.flat[extent.offset : extent.stop].view(extent.parameter.shape).data


class ChunkedBuffer:
    """Like a `FlatBuffer`, for parameters that are cut into chunks along a dim.

    Collectives use ``flat`` [world_size * S]; modules and autograd use ``views``.

    `acquire` gives memory to the one that is filled first. `unpack` copies from ``flat`` to the
    views and frees ``flat``; `pack` copies from the views to ``flat`` and frees the views.
    """

    def __init__(
        self,
        layout: ChunkedLayout,
        pool: Pool,
        own_pool: Pool,
        *,
        dtype: str | None,
        owns_memory: bool,
        fills_views: bool,
    ) -> None:
        self.layout = layout
        self._chunks = FlatBuffer(layout, pool, dtype=dtype, suffix=" in chunks")
        # What ``views`` view. Not in shared memory: it is written while other ranks may read it.
        self.whole = FlatBuffer(layout.whole, own_pool, dtype=dtype, owns_memory=owns_memory)
        self._owns_memory = owns_memory
        self._first = self.whole if fills_views else self._chunks
        self.num_bytes = self._chunks.num_bytes
        self.name = self._chunks.name
        self.flat = self._chunks.flat
        self.views = self.whole.views
        self.slot_of = self._chunks.slot_of
        self.shared_buffer = self._chunks.shared_buffer
        self.storages = self.whole.storages

    @property
    def is_acquired(self) -> bool:
        return self._chunks.is_acquired or self.whole.is_acquired

    def acquire(self) -> None:
        self._first.acquire()

    def unpack(self) -> None:
        self.whole.acquire()
        chunks, parts = self._chunks_and_parts
        foreach_copy_(parts, chunks)
        self._chunks.release()

    def pack(self) -> None:
        self._chunks.acquire()
        chunks, parts = self._chunks_and_parts
        foreach_copy_(chunks, parts)
        if not self._owns_memory:
            self.whole.release()

    def release(self) -> None:
        for buffer in (self._chunks, self.whole):
            if buffer.is_acquired:
                buffer.release()

    @cached_property
    def _chunks_and_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Chunks in ``flat``, and the same elements in the whole parameters.

        They view the flat tensors and not `views`, whose versions autograd compares.
        """
        layouts = zip(self.layout.extents, self.layout.whole.extents, strict=True)
        pairs = list(chain.from_iterable(self._pairs_of(*extents) for extents in layouts))
        chunks = [chunk for chunk, _ in pairs if chunk.numel()]
        return chunks, [part for _, part in pairs if part.numel()]

    def _pairs_of(
        self, extent: ParameterExtent, whole: ParameterExtent
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pair all chunks of full length [ranks, *chunk], and a shorter last one, if any."""
        spec, shards = extent.parameter, self.flat.view(self.layout.world_size, -1)
        dim = chunk_dim(spec)
        parameter = self.whole.flat[whole.offset : whole.stop].view(spec.shape)
        length = len(chunk_of(spec.shape[dim], self.layout.world_size, 0))
        num_full, rest = divmod(spec.shape[dim], max(1, length))
        last = parameter.narrow(dim, num_full * length, rest)
        outer, inner = spec.shape[:dim], spec.shape[dim + 1 :]
        full = parameter.narrow(dim, 0, num_full * length)
        full = full.view(*outer, num_full, length, *inner).movedim(dim, 0)
        slots = shards[:num_full, extent.offset : extent.offset + full[:1].numel()]
        yield slots.view(full.shape), full
        if rest:
            slot = shards[num_full, extent.offset : extent.offset + last.numel()]
            yield slot.view(last.shape), last


def flat_buffer(
    layout: Layout,
    pool: Pool,
    own_pool: Pool | None = None,
    *,
    dtype: str | None = None,
    owns_memory: bool = False,
    fills_views: bool = False,
) -> FlatBuffer | ChunkedBuffer:
    """Return the buffer for ``layout``.

    Args:
        layout: a `ChunkedLayout` gets a `ChunkedBuffer`.
        pool: for the memory that collectives use, which ranks may share.
        own_pool: for private memory; by default ``pool``.
        dtype: by default that of the shards.
        owns_memory: the views may be used at any time.
        fills_views: autograd writes the views first, while a gather writes ``flat`` first.
    """
    if not isinstance(layout, ChunkedLayout):
        return FlatBuffer(layout, pool, dtype=dtype, owns_memory=owns_memory)
    options = {"owns_memory": owns_memory, "fills_views": fills_views}
    return ChunkedBuffer(layout, pool, own_pool or pool, dtype=dtype, **options)
