"""What quantized wires send, and the memory that they take meanwhile: of `transport.quantized`.

A hop holds the codes that it sends and those that it receives, decodes one row after another into a
sum, and encodes and decodes some elements at a time (`Blocks.scratch_bytes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.blockwise import Blocks
from shardwise.plan.axes import AxisBytes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan

__all__ = ["gather_scratch", "reduce_scratch", "reduced_bytes", "row_of"]

_DOUBLE = 8  # bytes; the sums of such addends are in double precision


@dataclass(frozen=True, slots=True)
class _Hop:
    """An exchange of a reduction: ``elements`` for each of ``ranks``."""

    ranks: int
    elements: int
    is_in_row: bool  # of the mesh
    gathers: bool = False  # the same ones for all
    copies: int = 0  # of all addends, before they are encoded


def row_of(plan: Plan, unit: UnitPlan | None = None) -> int:
    """Ranks of a row of the mesh."""
    num_shards = plan.world_size if unit is None else unit.num_shards or plan.world_size
    return num_shards // plan.replicas if plan.strategy.is_two_level else num_shards


def reduced_bytes(plan: Plan, unit: UnitPlan, layout: Layout, blocks: Blocks) -> AxisBytes:
    """What a rank sends in a quantized reduction."""
    in_row = elsewhere = 0
    for hop in _hops(plan, unit, layout):
        sent = blocks.num_bytes(hop.elements) * (hop.ranks - 1)
        in_row += sent * hop.is_in_row
        elsewhere += sent * (not hop.is_in_row)
    return AxisBytes(in_row, elsewhere)


def gather_scratch(unit: UnitPlan, ranks: int, *, on_cpu: bool) -> int:
    """The most that a quantized gather of the shards of ``ranks`` allocates; one runs at a time."""
    found = [0]
    for layout in unit.layouts:
        blocks, size = unit.gathers(layout), layout.shard_elements
        if blocks is not None and ranks > 1:
            itemsize = layout.cast.compute_itemsize
            found.append(_gather_bytes(blocks, ranks, size, itemsize, on_cpu=on_cpu))
    return max(found)


def reduce_scratch(plan: Plan, unit: UnitPlan, *, on_cpu: bool) -> int:
    """The most that a quantized reduction of the unit allocates; one runs at a time."""
    return max(
        (
            _sum_bytes(plan, unit, layout, blocks, on_cpu=on_cpu)
            for layout in unit.trainable_layouts
            if (blocks := unit.reduces(layout)) is not None
        ),
        default=0,
    )


def _gather_bytes(blocks: Blocks, ranks: int, size: int, itemsize: int, *, on_cpu: bool) -> int:
    """Of codes, and of what encodes one row or decodes all."""
    work = max(
        blocks.scratch_bytes(rows, size, to_numbers=rows > 1, itemsize=itemsize, on_cpu=on_cpu)
        for rows in (1, ranks)
    )
    return ranks * blocks.num_bytes(size) + work


def _sum_bytes(plan: Plan, unit: UnitPlan, layout: Layout, blocks: Blocks, *, on_cpu: bool) -> int:
    peak = value = 0  # the sum so far, which is the reduce buffer first
    itemsize = layout.cast.reduce_itemsize  # of what is encoded
    sum_itemsize = max(4, itemsize) if itemsize != _DOUBLE else _DOUBLE
    keeps_rounding = unit.wire.error_feedback  # in the first hop
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
            result = 2 * sum_itemsize * size  # and one addend
            decoding = result + blocks.scratch_bytes(
                1, size, to_numbers=True, itemsize=sum_itemsize, on_cpu=on_cpu
            )
            peak = max(peak, value + codes + max(encoding, decoding))
        value, itemsize, keeps_rounding = result, sum_itemsize, False
    return peak


def _hops(plan: Plan, unit: UnitPlan, layout: Layout) -> Iterator[_Hop]:
    """As `QuantizedSums` exchanges: over the row, and then over the column."""
    size, is_two_level = layout.num_elements, plan.strategy.is_two_level
    near = unit.wire.ranks_per_host  # of the first stage
    for is_in_row, ranks in ((True, row_of(plan, unit)), (False, plan.replicas)):
        if ranks == 1:
            continue
        near = min(near or ranks, ranks)
        slot, whole = -(-size // ranks), size
        copies = (slot * ranks != size) + (near < ranks)
        yield _Hop(near, slot * ranks // near, is_in_row, copies=copies)
        if near < ranks:
            yield _Hop(ranks // near, slot, is_in_row)
        is_scattered = is_in_row or is_two_level
        if not is_scattered:
            yield _Hop(ranks, slot, is_in_row, gathers=True)
        size, near = slot if is_scattered else whole, None
