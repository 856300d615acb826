"""The buffers of gathered parameters and of gradients: tensors whose memory comes from a pool.

A `FlatBuffer` is one Storage object for life, and tensors that view it. Its memory is swapped in
from a pool and out again, so everything that holds a view (a parameter, or what autograd saved)
sees the memory that is there now. A `ChunkedBuffer` is two of them, with copies in between.
"""

import zlib
from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from shardwise._private import foreach_copy_
from shardwise.plan.chunks import ChunkedLayout, chunk_dim, chunk_of
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.runtime.memory import CAN_SWAP, Pool, swap_memory
from shardwise.transport.host.shared_memory import SharedRange

__all__ = ["ChunkedBuffer", "FlatBuffer", "flat_buffer"]


class FlatBuffer:
    """The flat buffer of a layout: ``flat`` [world_size * S] and one view for each parameter.

    ``flat`` and the views stay the same objects. They may be read between `acquire` and `release`;
    with ``owns_memory`` at any time, and neither is called.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        *,
        dtype: str | None = None,
        owns_memory: bool = False,
        owner_suffix: str = "",
    ) -> None:
        self.layout = layout
        of: torch.dtype = getattr(torch, dtype or layout.dtype)
        self.num_bytes = layout.num_elements * of.itemsize
        # No other buffer of the pool holds the parameter.
        self.owner = layout.extents[0].parameter.name + owner_suffix
        self.owners = (self.owner,)
        self._pool = pool
        self._memory: torch.UntypedStorage | None = None  # while acquired
        self._is_of_pool = True
        self._private: torch.UntypedStorage | None = None  # in place of shared memory
        names = [one.parameter.names for one in layout.extents]
        self._key = zlib.crc32(repr((names, owner_suffix)).encode())
        if owns_memory and pool.allocator is not None:
            storage = pool.allocator(self.num_bytes, self.owner)
        else:
            storage = pool.new_storage(self.num_bytes)
        self.flat = torch.empty(0, dtype=of, device=storage.device).set_(
            storage, 0, (layout.num_elements,), (1,)
        )
        # `.data` has its own version counter, so autograd does not see that the buffer is filled
        # again, and no reference to `flat`.
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

    def slot_of(self, rank: int) -> Tensor:
        """The part [S] of ``flat`` that ``rank`` owns."""
        size = self.layout.shard_elements
        return self.flat[rank * size : (rank + 1) * size]

    def acquire(self, memory: torch.UntypedStorage | None = None) -> None:
        """Give the buffer memory with undefined content; ``memory`` is empty until `release`.

        Args:
            memory: of its size; by default the pool's.
        """
        assert self._memory is None, "acquired twice"
        assert memory is None or (CAN_SWAP and memory.nbytes() == self.num_bytes)
        self._is_of_pool = memory is None
        self._memory = self._pool.allocate(self.num_bytes, self.owner) if memory is None else memory
        self._pool.acquired_keys ^= self._key
        swap_memory(self._storage, self._memory)

    def unpack(self) -> None:
        """Have the views show the gathered values: they do."""

    def pack(self) -> None:
        """Have ``flat`` hold the values of the views: it does."""

    def shared_range(self) -> SharedRange | None:
        """What lets ranks gather the buffer in shared memory; None if they cannot."""
        shared, num_bytes = self._pool.shared, self.num_bytes
        if shared is None or not num_bytes:
            return None
        return SharedRange(
            *shared.locate(self._storage.data_ptr(), self._pool.acquired_keys),
            lambda file, place: self._move(shared.open(file, place, num_bytes)),
            lambda: self._move(self._pool.new_storage(num_bytes)),
        )

    def release(self) -> None:
        """Take its memory away."""
        assert self._memory is not None, "released without being acquired"
        if self._private is not None:
            swap_memory(self._storage, self._private)
            self._private = None
        else:
            swap_memory(self._storage, self._memory)
        if self._is_of_pool:
            self._pool.free(self._memory)
        self._pool.acquired_keys ^= self._key
        self._memory = None

    def _move(self, elsewhere: torch.UntypedStorage) -> None:
        """Exchange the memory that it was given, which stays as it is, for other memory."""
        assert self._memory is not None
        self._private = elsewhere
        swap_memory(self._storage, self._memory)
        swap_memory(self._storage, elsewhere)

    def _view(self, extent: ParameterExtent) -> Tensor:
        return self.flat[extent.offset : extent.stop].view(extent.parameter.shape).data


class ChunkedBuffer:
    """As a `FlatBuffer`, of parameters that are cut into chunks of a dim.

    Collectives use ``flat`` [world_size * S], modules and autograd ``views``.

    `acquire` gives memory to the one that is filled first; `unpack` copies from ``flat`` to the
    views and frees ``flat``, and `pack` copies in the other direction and frees the views.
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
        self._chunks = FlatBuffer(layout, pool, dtype=dtype, owner_suffix=" in chunks")
        # Not in memory that ranks share: it is written when other ranks may still read there.
        self._whole = FlatBuffer(layout.whole, own_pool, dtype=dtype, owns_memory=owns_memory)
        self._owns_memory = owns_memory
        self._first = self._whole if fills_views else self._chunks
        self.num_bytes = self._chunks.num_bytes
        self.owners = (self._chunks.owner, self._whole.owner)
        self.flat = self._chunks.flat
        self.views = self._whole.views
        self.slot_of = self._chunks.slot_of
        self.shared_range = self._chunks.shared_range

    @property
    def is_acquired(self) -> bool:
        return self._chunks.is_acquired or self._whole.is_acquired

    def acquire(self) -> None:
        self._first.acquire()

    def unpack(self) -> None:
        self._whole.acquire()
        chunks, parts = self._chunks_and_parts
        foreach_copy_(parts, chunks)
        self._chunks.release()

    def pack(self) -> None:
        self._chunks.acquire()
        chunks, parts = self._chunks_and_parts
        foreach_copy_(chunks, parts)
        if not self._owns_memory:
            self._whole.release()

    def release(self) -> None:
        for buffer in (self._chunks, self._whole):
            if buffer.is_acquired:
                buffer.release()

    @cached_property
    def _chunks_and_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Chunks in ``flat``, and the same elements of the whole parameters: two pairs for each.

        They are views of the flat tensors, not of `views`, whose versions autograd compares.
        """
        layouts = zip(self.layout.extents, self.layout.whole.extents, strict=True)
        pairs = list(chain.from_iterable(self._pairs_of(*extents) for extents in layouts))
        chunks = [chunk for chunk, _ in pairs if chunk.numel()]
        return chunks, [part for _, part in pairs if part.numel()]

    def _pairs_of(
        self, extent: ParameterExtent, whole: ParameterExtent
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The chunks of full length [ranks, *chunk], and the last one, which may be shorter."""
        spec, shards = extent.parameter, self.flat.view(self.layout.world_size, -1)
        dim = chunk_dim(spec)
        parameter = self._whole.flat[whole.offset : whole.stop].view(spec.shape)
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
    """The buffer for ``layout``.

    Args:
        layout: a `ChunkedLayout` needs two buffers.
        pool: of what collectives use; it may be in memory that ranks share.
        own_pool: of this rank alone; by default ``pool``.
        dtype: by default that of the shards.
        owns_memory: the views may be used at any time.
        fills_views: they are written first, as by autograd, and not ``flat``, as by a gather.
    """
    if not isinstance(layout, ChunkedLayout):
        return FlatBuffer(layout, pool, dtype=dtype, owns_memory=owns_memory)
    options = {"owns_memory": owns_memory, "fills_views": fills_views}
    return ChunkedBuffer(layout, pool, own_pool or pool, dtype=dtype, **options)
