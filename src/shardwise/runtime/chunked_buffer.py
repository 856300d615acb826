"""The two buffers of parameters that are cut into chunks of a dim, and the copies between them."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

from torch import Tensor

from shardwise._private import foreach_copy_
from shardwise.plan.chunks import ChunkedLayout, chunk_dim, chunk_of
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.runtime.memory import FlatBuffer, Pool

__all__ = ["ChunkedBuffer", "flat_buffer"]


class ChunkedBuffer:
    """As a `FlatBuffer`: collectives use ``flat`` [world_size * S], modules and autograd ``views``.

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
