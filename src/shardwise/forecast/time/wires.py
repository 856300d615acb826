"""Bytes that quantized wires send, and their scratch memory, as in `comm.quantized`.

A hop holds the codes that it sends and receives, decodes one row after another into a sum, and
encodes and decodes a limited number of elements at a time (`Blocks.scratch_bytes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.blockwise import Blocks
from shardwise.plan.axes import AxisBytes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan

__all__ = [
    "gather_scratch",
    "packed_bytes",
    "reduce_scratch",
    "reduced_bytes",
    "row_of",
    "slot_bytes",
]

_DOUBLE = 8  # bytes of a float64; float64 addends are summed in float64


@dataclass(frozen=True, slots=True)
class _Hop:
    """One exchange of a reduction."""

    ranks: int
    elements: int  # for each rank
    is_in_row: bool  # whether it runs along a mesh row, not a column
    gathers: bool = False  # whether all ranks get the same elements
    copies: int = 0  # copies of all addends before they are encoded
    stride: int = 1  # distance of its ranks

    def ranks_in_subgroup(self, size: int) -> int:
        """Number of its ranks in a subgroup of the row; ``size`` and stride divide one another."""
        return min(self.ranks, max(1, size // self.stride)) if self.is_in_row else 1


def row_of(plan: Plan, unit: UnitPlan | None = None) -> int:
    """Return the number of ranks in a row of the mesh."""
    num_shards, replicas = plan.world_size, plan.replicas
    if unit is not None:
        num_shards, replicas = unit.options.world_size, unit.options.replicas
    return num_shards // replicas if plan.strategy.is_two_level else num_shards


def reduced_bytes(plan: Plan, unit: UnitPlan, layout: Layout, blocks: Blocks) -> AxisBytes:
    """Return the bytes that a rank sends in a quantized reduction."""
    in_row = elsewhere = in_subgroup = 0
    for hop in _hops(plan, unit, layout):
        row = blocks.num_bytes(hop.elements)
        sent = row * (hop.ranks - 1)
        in_row += sent * hop.is_in_row
        elsewhere += sent * (not hop.is_in_row)
        in_subgroup += row * (hop.ranks_in_subgroup(unit.inner_ranks) - 1)
    return AxisBytes(in_row, elsewhere, subgroup=in_subgroup)


def slot_bytes(unit: UnitPlan) -> int:
    """Return the bytes that one rank's shards of a unit take when they are sent."""
    found = 0
    for layout in unit.layouts:
        if layout.needs_gather:
            exact, blocks = layout.gathered_bytes // layout.world_size, unit.gather_blocks(layout)
            found += exact if blocks is None else blocks.num_bytes(layout.shard_elements)
    return found


def packed_bytes(dtype: str, block: int, num_elements: int) -> int:
    """Return the bytes of ``num_elements`` differences in a format of `Outer`."""
    if dtype in ("int4", "int8"):
        return Blocks(dtype, block).num_bytes(num_elements)
    return num_elements * {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]


def gather_scratch(unit: UnitPlan, ranks: int, *, on_cpu: bool) -> int:
    """Return the scratch memory of a quantized gather over ``ranks``; one gather runs at a time."""
    found = [0]
    for layout in unit.layouts:
        blocks, size = unit.gather_blocks(layout), layout.shard_elements
        if blocks is not None and ranks > 1:
            itemsize = layout.cast.compute_itemsize
            found.append(_gather_bytes(blocks, ranks, size, itemsize, on_cpu=on_cpu))
    return max(found)


def reduce_scratch(plan: Plan, unit: UnitPlan, *, on_cpu: bool) -> int:
    """Return the scratch memory of a unit's quantized reduction; one reduction runs at a time."""
    return max(
        (
            _sum_bytes(plan, unit, layout, blocks, on_cpu=on_cpu)
            for layout in unit.trainable_layouts
            if (blocks := unit.reduce_blocks(layout)) is not None
        ),
        default=0,
    )


def _gather_bytes(blocks: Blocks, ranks: int, size: int, itemsize: int, *, on_cpu: bool) -> int:
    """Return the bytes of the codes, and of encoding one row or decoding all rows."""
    work = max(
        blocks.scratch_bytes(rows, size, to_numbers=rows > 1, itemsize=itemsize, on_cpu=on_cpu)
        for rows in (1, ranks)
    )
    return ranks * blocks.num_bytes(size) + work


def _sum_bytes(plan: Plan, unit: UnitPlan, layout: Layout, blocks: Blocks, *, on_cpu: bool) -> int:
    peak = value = 0  # value: bytes of the sum so far; at first it is the reduce buffer
    itemsize = layout.cast.reduce_itemsize  # bytes of an element to encode
    sum_itemsize = max(4, itemsize) if itemsize != _DOUBLE else _DOUBLE
    keeps_rounding = unit.options.wire.error_feedback  # only in the first hop
    for hop in _hops(plan, unit, layout):
        size, ranks = hop.elements, hop.ranks
        if hop.gathers:
            result = sum_itemsize * ranks * size
            peak = max(
                peak,
                value + result + _gather_bytes(blocks, ranks, size, itemsize, on_cpu=on_cpu),
            )
        else:
            codes = 2 * ranks * blocks.num_bytes(size)
            copies = (hop.copies + keeps_rounding) * ranks * size * itemsize
            encoding = copies + blocks.scratch_bytes(
                ranks, size, to_numbers=False, itemsize=itemsize, on_cpu=on_cpu
            )
            result = 2 * sum_itemsize * size  # the sum and one addend
            decoding = result + blocks.scratch_bytes(
                1, size, to_numbers=True, itemsize=sum_itemsize, on_cpu=on_cpu
            )
            peak = max(peak, value + codes + max(encoding, decoding))
        value, itemsize, keeps_rounding = result, sum_itemsize, False
    return peak


def _hops(plan: Plan, unit: UnitPlan, layout: Layout) -> Iterator[_Hop]:
    """Yield the exchanges of `QuantizedSums`: first along the row, then along the column."""
    size, is_two_level = layout.num_elements, plan.strategy.is_two_level
    near = unit.options.wire.ranks_per_host  # ranks of the first stage
    for is_in_row, ranks in ((True, row_of(plan, unit)), (False, unit.options.replicas)):
        if ranks == 1:
            continue
        near = min(near or ranks, ranks)
        slot, whole = -(-size // ranks), size
        copies = (slot * ranks != size) + (near < ranks)
        yield _Hop(near, slot * ranks // near, is_in_row, copies=copies)
        if near < ranks:
            yield _Hop(ranks // near, slot, is_in_row, stride=near)
        is_scattered = is_in_row or is_two_level
        if not is_scattered:
            yield _Hop(ranks, slot, is_in_row, gathers=True)
        size, near = slot if is_scattered else whole, None
