"""Scratch memory that reductions between CPUs take: what a forecast needs to know of them."""

__all__ = ["is_cut", "scratch_elements"]

_WHOLE_ELEMENTS = 1 << 14  # an all-reduce of fewer is one exchange of all


def scratch_elements(
    flat_elements: int, row: int, column: int, *, two_level: bool, is_cast: bool = False
) -> int:
    """What the reduction of a flat buffer takes on a wire, by row and then by column.

    A reduce-scatter receives from one of its ranks where the sum goes. That has this rank's own
    part already in an all-reduce; and in a reduce-scatter whose sum has no other place, as it goes
    on to the column or ``is_cast``.
    """
    slot = flat_elements // row
    by_row = max(row - 1 if is_cast or two_level else row - 2, 0) * slot
    if two_level:
        return max(by_row, (column - 1 if is_cast else column - 2) * (slot // column))
    by_column = slot // column if is_cut(slot, column) else slot
    return max(by_row, (column - 1) * by_column)


def is_cut(num_elements: int, num_ranks: int) -> bool:
    """Whether an all-reduce is worth two exchanges, of parts, so that each rank adds but a part."""
    return num_elements >= max(_WHOLE_ELEMENTS, num_ranks**2)
