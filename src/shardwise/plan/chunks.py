"""The layout of parameters that are cut into chunks of a dim, as in FSDP2.

Two ranks, W1 [5, 3] and b [3], both by "dim"; W1 has chunks of three rows, b of two elements::

    flat buffer   | W1 r0  r1  r2   b 0 1 | W1 r3  r4  . . .   b 2 . |    22 = 2 x 11
                  |<------ rank 0 ------->|<-------- rank 1 -------->|

The chunks of a parameter are at the same offset in every shard. The parameter is therefore in
pieces, one per rank, and compute needs a second buffer, in which it is contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardwise.plan.granularity import Dim
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec, Run, alignment_of, lay_out

__all__ = ["ChunkedLayout", "chunk_dim", "chunk_of", "chunk_shape", "lay_out_chunks"]


def chunk_of(size: int, world_size: int, rank: int) -> Run:
    """The part of a dim of ``size`` that `torch.chunk` gives to ``rank``."""
    length = -(-size // world_size)
    return Run(min(rank * length, size), min((rank + 1) * length, size))


def chunk_dim(parameter: ParameterSpec) -> int:
    """The dim along which ``parameter`` is cut."""
    assert isinstance(parameter.granularity, Dim)
    return parameter.granularity.dim


def chunk_shape(parameter: ParameterSpec, world_size: int, rank: int) -> tuple[int, ...]:
    """The shape of ``rank``'s chunk of ``parameter``."""
    dim = chunk_dim(parameter)
    shape = list(parameter.shape)
    shape[dim] = len(chunk_of(shape[dim], world_size, rank))
    return tuple(shape)


@dataclass(frozen=True)
class ChunkedLayout(Layout):
    """A flat buffer of chunks. The offset of an extent is the offset of its chunk in a shard."""

    needs_gather = True
    is_whole_sum = False

    def __post_init__(self) -> None:
        assert self.extents
        last = self.extents[-1]
        assert last.offset + self.num_owned(last, 0) <= self.shard_elements

    @cached_property
    def whole(self) -> Layout:
        """The second buffer, of the same length, in which each parameter is contiguous."""
        plain = [replace(extent.parameter, granularity="element") for extent in self.extents]
        return replace(lay_out(plain, 1), shard_elements=self.num_elements)

    def run(self, extent: ParameterExtent, rank: int) -> Run:
        """The elements that ``rank`` owns, of a parameter that is cut along dim 0."""
        parameter = extent.parameter
        assert chunk_dim(parameter) == 0, f"{parameter.name}: only chunks of dim 0 are runs"
        rows, row = chunk_of(parameter.shape[0], self.world_size, rank), prod(parameter.shape[1:])
        return Run(rows.start * row, rows.stop * row)

    def num_owned(self, extent: ParameterExtent, rank: int) -> int:
        return prod(chunk_shape(extent.parameter, self.world_size, rank))

    def offset_in_shard(self, extent: ParameterExtent, rank: int) -> int:  # noqa: ARG002
        return extent.offset

    def boundaries_inside(self, extent: ParameterExtent) -> int:
        return self.world_size - 1 if extent.parameter.num_elements else 0


def lay_out_chunks(parameters: Sequence[ParameterSpec], world_size: int) -> tuple[Layout, ...]:
    """Place ``parameters`` (of one dtype and "dim" granularity) in order, in one buffer."""
    if world_size == 1:
        return (lay_out(parameters, 1),)
    alignment = alignment_of(parameters[0])
    extents, end = [], 0
    for parameter in parameters:
        extents.append(ParameterExtent(parameter, end))
        slot = prod(chunk_shape(parameter, world_size, 0))
        end = -(-(end + slot) // alignment) * alignment
    return (ChunkedLayout(tuple(extents), world_size, end),)
