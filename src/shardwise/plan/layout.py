"""Where every element of every parameter is stored: integers only, no torch.

A unit's parameters of one dtype share a *flat buffer*, and rank r owns the r-th of ``world_size``
equal *shards* of it, each of ``shard_elements`` (S). The all-gather writes directly into the
buffer, the reduce-scatter reads directly from it, and a parameter is a view.

Two ranks, W1 [5, 3], W2 [2, 4], b [3]: 26 elements, S = 13 with an alignment of one element::

    flat buffer   | W1  0 1 2 3 4 5 6 7 8 9 a b c | W1 d e  W2 0 1 2 3 4 5 6 7  b 0 1 2 |
                  |<--------- rank 0 ------------>|<-------------- rank 1 ------------->|
    offsets         W1 0                                    W2 15               b 23
    runs            W1 [0, 13)                      W1 [13, 15)  W2 [0, 8)  b [0, 3)

The same with W1 cut by row and W2 not at all: S = 14. A parameter is a view, so there is no padding
between its rows; W1 begins at 2 for its fourth row to end with rank 0's shard::

    flat buffer   | . .  W1 r0  W1 r1  W1 r2  W1 r3 | W1 r4  W2 0 1 2 3 4 5 6 7  b 0 1 2 |
                  |<----------- rank 0 ------------>|<------------- rank 1 ------------->|
    offsets         W1 2                                     W2 17               b 25

Each rank owns one *run* of consecutive elements of the row-major parameter, often all of them or
none. Shards and parameters begin at multiples of ``alignment`` elements, because vector loads and
cuBLAS need 16 bytes. With element granularity, alignment is the only padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod

from shardwise.plan.granularity import Granularity, granule_elements
from shardwise.plan.packing import Piece, pack

__all__ = [
    "Cast",
    "Layout",
    "ParameterExtent",
    "ParameterSpec",
    "Run",
    "alignment_of",
    "lay_out",
    "lay_out_in_buffers",
]

# A second buffer needs a second collective, so it has to save this share of the parameters and this
# many bytes: the latency of a collective equals the transfer of some megabytes on a fast link.
SPLIT_SHARE = 0.05
SPLIT_BYTES = 1 << 20
SPLIT_TRIES = 6  # granules for which a second buffer is tried


@dataclass(frozen=True, slots=True)
class Cast:
    """The dtypes of compute and reductions, if they differ from the dtype of the shards."""

    compute_dtype: str  # of the gathered parameter
    compute_itemsize: int
    reduce_dtype: str  # of its gradient while it is reduced
    reduce_itemsize: int
    keeps_sums: bool = False  # the reduced gradient stays in that dtype


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The facts about a parameter that the plan uses; a tied parameter has several names."""

    names: tuple[str, ...]  # fully qualified; the first is the canonical one
    shape: tuple[int, ...]
    dtype: str  # of the shards, without torch's prefix, as in "float32"
    itemsize: int  # bytes
    trainable: bool
    granularity: Granularity = "element"
    cast: Cast | None = None
    is_extended: bool = False  # its class defines FSDP2's all-gather extensions

    def __post_init__(self) -> None:
        assert self.names, "a parameter has a name"
        assert all(size >= 0 for size in self.shape)
        assert self.itemsize > 0

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.itemsize

    @property
    def granule_elements(self) -> int:
        """The size of the smallest run that stays on one rank; the last run may be shorter."""
        return granule_elements(self.granularity, self.shape)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of a row-major parameter; empty when they are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParameterExtent:
    """The elements ``[offset, stop)`` of the flat buffer, which hold one parameter."""

    parameter: ParameterSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.parameter.num_elements


@dataclass(frozen=True)
class Layout:
    """A flat buffer of one unit and dtype over ``world_size`` ranks."""

    extents: tuple[ParameterExtent, ...]  # in order of offset, not of the module
    world_size: int
    shard_elements: int
    is_offloaded: bool = False  # the shard is in host memory

    def __post_init__(self) -> None:
        assert self.extents
        assert self.world_size >= 1
        parameters = [extent.parameter for extent in self.extents]
        kinds = {(one.dtype, one.cast, one.is_extended) for one in parameters}
        assert len(kinds) == 1, "the parameters of a buffer are of one kind"
        end = 0
        for extent in self.extents:
            assert extent.offset >= end, f"{extent.parameter.name} overlaps its predecessor"
            end = extent.stop
            assert self._cuts_no_granule(extent), f"{extent.parameter.name} is cut inside a granule"
        assert end <= self.num_elements, "the last parameter ends inside the buffer"

    def unfrozen(self) -> "Layout":
        """The same layout with trainable parameters."""
        extents = [
            replace(one, parameter=replace(one.parameter, trainable=True)) for one in self.extents
        ]
        return replace(self, extents=tuple(extents))

    @property
    def num_elements(self) -> int:
        """Length of the flat buffer, padding included."""
        return self.world_size * self.shard_elements

    @cached_property
    def parameter_elements(self) -> int:
        return sum(extent.parameter.num_elements for extent in self.extents)

    @property
    def padding_elements(self) -> int:
        return self.num_elements - self.parameter_elements

    @property
    def dtype(self) -> str:
        return self.extents[0].parameter.dtype

    @property
    def itemsize(self) -> int:
        return self.extents[0].parameter.itemsize

    @property
    def trainable(self) -> bool:
        """Whether the parameters get gradients: all of them do, or none."""
        return self.extents[0].parameter.trainable

    @property
    def is_extended(self) -> bool:
        """Whether the parameters' classes define all-gather extensions."""
        return self.extents[0].parameter.is_extended

    @cached_property
    def cast(self) -> Cast:
        """The dtypes of compute and of reductions."""
        return self.extents[0].parameter.cast or Cast(*(self.dtype, self.itemsize) * 2)

    @property
    def needs_gather(self) -> bool:
        """Whether compute cannot use the shard itself."""
        is_converted = self.cast.compute_dtype != self.dtype or self.is_extended
        return self.world_size > 1 or is_converted or self.is_offloaded

    @property
    def gradient_dtype(self) -> str:
        """The dtype of reduced gradients."""
        return self.cast.reduce_dtype if self.cast.keeps_sums else self.dtype

    @property
    def casts_sums(self) -> bool:
        """Whether reduced gradients are cast to another dtype."""
        return self.cast.reduce_dtype != self.gradient_dtype

    @property
    def is_whole_sum(self) -> bool:
        """Whether the reduced buffer can serve as the gradient shard."""
        return self.shard_elements == self.num_elements and not self.casts_sums

    @property
    def gathered_bytes(self) -> int:
        return self.num_elements * self.cast.compute_itemsize

    @property
    def reduced_bytes(self) -> int:
        """Size of the unreduced gradients."""
        return self.num_elements * self.cast.reduce_itemsize

    @property
    def shard_bytes(self) -> int:
        return self.shard_elements * self.itemsize

    @property
    def gradient_shard_bytes(self) -> int:
        """Size of one rank's shard of the reduced gradients."""
        itemsize = self.cast.reduce_itemsize if self.cast.keeps_sums else self.itemsize
        return self.shard_elements * itemsize

    def run(self, extent: ParameterExtent, rank: int) -> Run:
        """The elements of ``extent``'s parameter that ``rank`` owns."""
        size = extent.parameter.num_elements
        start = rank * self.shard_elements - extent.offset
        stop = start + self.shard_elements
        return Run(min(max(start, 0), size), min(max(stop, 0), size))

    def runs(self, extent: ParameterExtent) -> tuple[Run, ...]:
        """The run of ``extent``'s parameter on each rank; together they cover it in order."""
        return tuple(self.run(extent, rank) for rank in range(self.world_size))

    def num_owned(self, extent: ParameterExtent, rank: int) -> int:
        """How many elements of ``extent``'s parameter ``rank`` owns."""
        return len(self.run(extent, rank))

    def offset_in_shard(self, extent: ParameterExtent, rank: int) -> int:
        """Where ``rank``'s run of ``extent``'s parameter begins in that rank's shard."""
        return min(max(extent.offset - rank * self.shard_elements, 0), self.shard_elements)

    def slices_of_shard(self, rank: int) -> list[slice]:
        """The part of ``rank``'s shard that each parameter occupies."""
        starts = [self.offset_in_shard(extent, rank) for extent in self.extents]
        lengths = [self.num_owned(extent, rank) for extent in self.extents]
        return [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]

    def boundaries_inside(self, extent: ParameterExtent) -> int:
        """How many times ``extent``'s parameter is cut."""
        if extent.offset == extent.stop:
            return 0
        return (extent.stop - 1) // self.shard_elements - extent.offset // self.shard_elements

    def _cuts_no_granule(self, extent: ParameterExtent) -> bool:
        """Check the first cut and S, which determine all other cuts."""
        granule, cuts = extent.parameter.granule_elements, self.boundaries_inside(extent)
        first = self.shard_elements - extent.offset % self.shard_elements if cuts else 0
        return first % granule == 0 and (cuts <= 1 or self.shard_elements % granule == 0)


def alignment_of(parameter: ParameterSpec) -> int:
    """The alignment in elements: at least 16 bytes, and equal for all dtypes of 2 bytes or more.

    Mixed precision therefore does not move the cuts, and states of one precision fit any other.
    """
    cast = parameter.cast
    itemsizes = (cast.compute_itemsize, cast.reduce_itemsize) if cast else ()
    itemsize: int = min((parameter.itemsize, *itemsizes))
    return max(8, 16 // itemsize)


def lay_out(
    parameters: Sequence[ParameterSpec], world_size: int, *, alignment: int | None = None
) -> Layout:
    """Place ``parameters`` (of one dtype) in a flat buffer over ``world_size`` ranks.

    They keep their order unless another order saves padding, which it never does with element
    granularity. Cuts are at multiples of the granule and of the alignment.
    """
    alignment = alignment or alignment_of(parameters[0])
    pieces = tuple(_piece(parameter, alignment) for parameter in parameters if parameter.num_bytes)
    packing = pack(pieces, world_size)
    offsets = (offset * alignment for offset in packing.offsets)
    extents, end = [], 0
    for parameter in parameters:
        # A parameter without elements is placed at the end of its predecessor.
        extents.append(ParameterExtent(parameter, next(offsets) if parameter.num_bytes else end))
        end = -(-extents[-1].stop // alignment) * alignment
    extents.sort(key=lambda extent: (extent.offset, extent.stop))
    return Layout(tuple(extents), world_size, packing.shard_length * alignment)


def lay_out_in_buffers(parameters: Sequence[ParameterSpec], world_size: int) -> tuple[Layout, ...]:
    """Place ``parameters`` (of one dtype) in one flat buffer, or in two if that saves enough.

    In one buffer, S is a multiple of the row lengths of all large parameters. A second buffer for
    one row length removes it from that multiple: a block of Qwen2-7B, by row on 512 ranks, has
    16.5 % padding in one buffer and 0.8 % in two.
    """
    one = lay_out(parameters, world_size)
    worth = max(SPLIT_SHARE * one.parameter_elements, SPLIT_BYTES / one.itemsize)
    if one.padding_elements < worth:
        return (one,)
    best = min(((one,), *_in_two_buffers(parameters, world_size)), key=_num_elements)
    return best if one.num_elements - _num_elements(best) >= worth else (one,)


def _in_two_buffers(
    parameters: Sequence[ParameterSpec], world_size: int
) -> Iterator[tuple[Layout, Layout]]:
    """Yield a layout in two buffers for each of the largest granules, which gets the second."""
    granules = sorted({parameter.granule_elements for parameter in parameters}, reverse=True)
    for granule in granules[:SPLIT_TRIES] if len(granules) > 1 else ():
        rest = [p for p in parameters if p.granule_elements != granule]
        apart = [p for p in parameters if p.granule_elements == granule]
        yield lay_out(rest, world_size), lay_out(apart, world_size)


def _piece(parameter: ParameterSpec, alignment: int) -> Piece:
    """The piece for ``parameter``, measured in multiples of the alignment."""
    return Piece(
        size=-(-parameter.num_elements // alignment),
        granule=lcm(parameter.granule_elements, alignment) // alignment,
    )


def _num_elements(layouts: Sequence[Layout]) -> int:
    return sum(layout.num_elements for layout in layouts)
